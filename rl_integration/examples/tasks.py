"""What the GRPO example trains on: prompts for each step, and the reward of a response."""

import json
from pathlib import Path
from typing import Any, Protocol

from s3r_sglang.rl_integration.client import PlacedGroup
from s3r_sglang.rl_integration.reward import grade_all


class Task(Protocol):
    """Prompts and rewards."""

    def prompts(self, step: int, count: int) -> list[dict[str, Any]]:
        """`count` prompts of the rollout service for `step`."""

    def rewards(self, groups: list[PlacedGroup]) -> list[list[float]]:
        """One row per group, one reward per response."""


class EvenTokens:
    """Answer with even token ids; the reward is their share. Needs no data and no tokenizer."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def prompts(self, step: int, count: int) -> list[dict[str, Any]]:
        """The same prompts at every step."""
        rows = [[(7 * n + 3 * i + 2) % self.vocab for i in range(8)] for n in range(count)]
        return [{"id": f"p{n}", "token_ids": ids} for n, ids in enumerate(rows)]

    def rewards(self, groups: list[PlacedGroup]) -> list[list[float]]:
        """Shares of even ids."""
        return even_shares(groups)


def even_shares(groups: list[PlacedGroup]) -> list[list[float]]:
    """Share of even token ids in each response."""
    return [
        [sum(token % 2 == 0 for token in r.token_ids) / len(r.token_ids) for r in group.responses]
        for group in groups
    ]


class Mathematics:
    """Problems of a file that `s3r data prepare` wrote; 1 for a right answer, 0 for a wrong or truncated one.

    Args:
        even: reward even token ids instead, to measure with responses of any length, which are all truncated.

    Raises:
        SystemExit: the file cannot be read, or a line has no id, messages or answer.
    """

    def __init__(self, path: Path, even: bool = False) -> None:
        self.even = even
        self.rows: list[dict[str, Any]] = []
        self.answers: dict[str, str] = {}
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SystemExit(f"{path} cannot be read: {error}") from None
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                row = json.loads(line)
                self.rows.append({"id": row["id"], "messages": row["messages"]})
                self.answers[row["id"]] = row["answer"]
            except (ValueError, KeyError, TypeError) as error:
                raise SystemExit(f"{path}:{number} is not a line of `s3r data prepare`: {error!r}") from None
        if not self.rows:
            raise SystemExit(f"{path} holds no problems")

    def prompts(self, step: int, count: int) -> list[dict[str, Any]]:
        """The next `count` problems of the file, from its beginning again after the last."""
        if count > len(self.rows):
            raise SystemExit(f"{count} prompts a step, but the file has {len(self.rows)} problems")
        return [self.rows[(step * count + n) % len(self.rows)] for n in range(count)]

    def rewards(self, groups: list[PlacedGroup]) -> list[list[float]]:
        """Graded answers; a truncated response has none, as in the paper's appendix C.1."""
        if self.even:
            return even_shares(groups)
        responses = [(group.prompt_id, response) for group in groups for response in group.responses]
        verdicts = grade_all(
            ["" if response.truncated else response.text for _, response in responses],
            [self.answers[str(prompt)] for prompt, _ in responses],
        )
        graded = iter(float(verdict.correct) for verdict in verdicts)
        return [[next(graded) for _ in group.responses] for group in groups]
