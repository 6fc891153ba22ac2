"""pass@1 of a file of rollouts (arXiv 2610.13202, appendix C.3)."""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3r_sglang.rl_integration.data.sources import DataError
from s3r_sglang.rl_integration.reward import grade_all


@dataclass(frozen=True)
class Score:
    """Results on one data set.

    Attributes:
        problems, responses: how many there are.
        pass_at_1: share of right responses of a problem, averaged over the problems, in percent.
        error: standard error of `pass_at_1` over the problems, in percentage points; None for a single problem.
        truncated: share of responses that a length limit ended; they count as wrong.
    """

    problems: int
    responses: int
    pass_at_1: float
    error: float | None
    truncated: float


def score(path: Path) -> dict[str, Score]:
    """Grade the output of `s3r rollout` on a file of `s3r data prepare`; one score per data set.

    Raises:
        DataError: a line is no response, or its prompt had no answer.
    """
    rows = _rows(path)
    verdicts = grade_all(
        ["" if row["finish_reason"] == "length" else row["text"] for row in rows],
        [row["metadata"]["answer"] for row in rows],
    )
    right: dict[str, dict[str, list[bool]]] = {}
    truncated: dict[str, int] = {}
    for row, verdict in zip(rows, verdicts, strict=True):
        name = row["metadata"].get("datasource") or "all"
        right.setdefault(name, {}).setdefault(str(row["prompt_id"]), []).append(verdict.correct)
        truncated[name] = truncated.get(name, 0) + (row["finish_reason"] == "length")
    return {name: _score(list(problems.values()), truncated[name]) for name, problems in right.items()}


def _score(problems: list[list[bool]], truncated: int) -> Score:
    shares = [100 * statistics.mean(correct) for correct in problems]
    responses = sum(map(len, problems))
    error = statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None
    return Score(len(problems), responses, statistics.mean(shares), error, truncated / responses)


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error})") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            answer = row["metadata"]["answer"]
            complete = isinstance(answer, str) and all(
                isinstance(row[key], str) for key in ("text", "finish_reason")
            )
            if not complete or "prompt_id" not in row:
                raise TypeError("no answer, text or prompt_id")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number} is not a response of `s3r rollout` to a prompt with an answer ({error!r})"
            ) from None
        rows.append(row)
    if not rows:
        raise DataError(f"{path} holds no responses")
    return rows
