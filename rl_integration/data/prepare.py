"""Data set in, JSON lines out: problems told apart, framed as prompts, shuffled by seed, split.

One line serves all readers: `s3r rollout` and the rollout service take `id` and `messages`, OpenRLHF
`--data.input_key messages --data.label_key answer --data.apply_chat_template` (its evaluation groups by
`datasource`), the GRPO example all of them.
"""

import hashlib
import json
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3r_sglang.rl_integration.data import arithmetic
from s3r_sglang.rl_integration.data.sources import DAPO_AFTER, DAPO_BEFORE, SOURCES, DataError, Problem, read

# How a problem is put to the model. The reward understands both.
STYLES = {
    "dapo": DAPO_BEFORE + "{}" + DAPO_AFTER,
    "boxed": "{}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
}


@dataclass(frozen=True)
class Summary:
    """What became of the rows.

    Attributes:
        rows: rows read.
        duplicates: rows whose problem and answer had been seen.
        conflicts: problems left out because rows disagree about the answer, so that no reward would be right.
        written, held_out: lines of the two files.
        paper_rows: problems that the paper used of this data set, if it says so.
    """

    rows: int
    duplicates: int
    conflicts: int
    written: int
    held_out: int
    paper_rows: int | None


def prepare(
    name: str,
    out: Path,
    *,
    source: Path | None = None,
    style: str = "dapo",
    seed: int = 0,
    limit: int | None = None,
    holdout: int = 0,
    force: bool = False,
) -> Summary:
    """Write the prompts of data set `name` to `out`, and `holdout` of them to `<out stem>.holdout.jsonl` instead.

    The order depends on the seed and the problems, not on their order in the source.

    Args:
        name: key of `SOURCES`, or "arithmetic", which is made up from the seed and needs no download.
        source: local file or folder of the data set's schema; None reads the hub.
        style: key of `STYLES`.
        limit: keep only so many problems, of both files together.
        force: overwrite files that exist.

    Raises:
        DataError: unusable arguments or data; nothing has been written.
    """
    targets = [out, out.with_name(f"{out.stem}.holdout{out.suffix}")][: 2 if holdout else 1]
    for target in targets:
        if target.exists() and not force:
            raise DataError(f"{target} exists; pass --force to overwrite it")
        if target.parent.exists() and not target.parent.is_dir():
            raise DataError(f"{target.parent} is not a folder")
    rows, problems, conflicts = distinct(_problems(name, source, seed, limit))
    records = [record(name, problem, style) for problem in problems]
    records.sort(key=lambda line: line["id"])
    random.Random(seed).shuffle(records)
    records = records[:limit]
    if holdout >= len(records):
        raise DataError(f"--holdout {holdout} would leave none of {len(records)} problems")
    parts = [records[holdout:], records[:holdout]]
    out.parent.mkdir(parents=True, exist_ok=True)
    for target, part in zip(targets, parts, strict=False):
        _write(target, part)
    duplicates = rows - len(problems) - sum(conflicts.values())
    paper_rows = SOURCES[name].paper_rows if name in SOURCES else None
    return Summary(rows, duplicates, len(conflicts), len(parts[0]), len(parts[1]), paper_rows)


def _problems(name: str, source: Path | None, seed: int, limit: int | None) -> Iterable[Problem]:
    if name in SOURCES:
        return read(SOURCES[name], source)
    if name != "arithmetic":
        raise DataError(f"there is no data set {name!r}; known are {', '.join(SOURCES)}, arithmetic")
    if source:
        raise DataError("arithmetic is made up here, it takes no --source")
    try:
        return arithmetic.problems(limit or 1024, seed)
    except ValueError as error:
        raise DataError(str(error)) from None


def distinct(problems: Iterable[Problem]) -> tuple[int, list[Problem], dict[str, int]]:
    """Tell problems apart by their statement, up to white space.

    Returns:
        The number of problems given; those left, each once, in order; and for each statement that came with
        several answers, and was left out for that, how often it occurred.
    """
    seen: dict[str, Problem] = {}
    count: dict[str, int] = {}
    contradicted: set[str] = set()
    total = 0
    for problem in problems:
        total += 1
        key = " ".join(problem.statement.split())
        count[key] = count.get(key, 0) + 1
        if seen.setdefault(key, problem).answer != problem.answer:
            contradicted.add(key)
    left = [problem for key, problem in seen.items() if key not in contradicted]
    return total, left, {key: count[key] for key in contradicted}


def record(name: str, problem: Problem, style: str) -> dict[str, Any]:
    """The line of one problem; its id is made from the statement and so stays the same between releases."""
    digest = hashlib.sha256(problem.statement.encode()).hexdigest()[:12]
    content = STYLES[style].format(problem.statement)
    return {
        "id": f"{name}-{digest}",
        "messages": [{"role": "user", "content": content}],
        "answer": problem.answer,
        "datasource": name,
    }


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    """Write all or nothing."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as out:
        for line in records:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(partial, path)
