"""The data sets of the paper: where they are, the schema of their rows, and how a row becomes a problem.

Rows are read with the `datasets` library, from the hub or from local files of the same schema, and every row is
checked: a column that is missing or has another type stops the preparation before anything is written.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
FORMATS = {"parquet": "parquet", "jsonl": "json", "json": "json"}

Text = Annotated[str, Field(min_length=1)]


class DataError(ValueError):
    """The data cannot be used; the message is one sentence that says where and why."""


class _Row(BaseModel):
    # Columns beyond those that are needed come and go between releases of a data set.
    model_config = ConfigDict(strict=True, extra="ignore")


class _Message(_Row):
    role: Text
    content: Text


class _Reference(_Row):
    ground_truth: Text


class DapoRow(_Row):
    """A row of BytedTsinghua-SIA/DAPO-Math-17k: one user message that frames the problem, and the answer."""

    prompt: Annotated[list[_Message], Field(min_length=1, max_length=1)]
    reward_model: _Reference


class MathArenaRow(_Row):
    """A row of MathArena's sets; AIME has integers for answers, ArXivMath LaTeX."""

    problem: Text
    answer: Text | int


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        statement: the problem alone, as it is told apart from others.
        answer: ground truth, a number or LaTeX.
    """

    statement: str
    answer: str


@dataclass(frozen=True)
class Source:
    """A data set.

    Attributes:
        repository: its name on the Hugging Face hub; `split` is the split that holds it.
        row: schema of its rows.
        problem: makes a problem of a valid row; raises DataError.
        paper_rows: problems that the paper used of it, where it says so (appendix C.3).
    """

    repository: str
    row: type[_Row]
    problem: Callable[[Any], Problem]
    paper_rows: int | None = None
    split: str = "train"


def _dapo_problem(row: DapoRow) -> Problem:
    text = row.prompt[0].content
    if not (text.startswith(DAPO_BEFORE) and text.endswith(DAPO_AFTER)):
        raise DataError(f"the prompt is not framed by DAPO's instructions: {text[:80]!r}")
    statement = text.removeprefix(DAPO_BEFORE).removesuffix(DAPO_AFTER)
    return Problem(statement.strip(), row.reward_model.ground_truth.strip())


def _matharena_problem(row: MathArenaRow) -> Problem:
    return Problem(row.problem.strip(), str(row.answer).strip())


SOURCES = {
    "dapo-math-17k": Source("BytedTsinghua-SIA/DAPO-Math-17k", DapoRow, _dapo_problem),
    "aime26": Source("MathArena/aime_2026", MathArenaRow, _matharena_problem, paper_rows=30),
    "arxiv-math": Source("MathArena/arxivmath", MathArenaRow, _matharena_problem, paper_rows=103),
}


def read(source: Source, path: Path | None) -> Iterator[Problem]:
    """All problems of `source`, duplicates included, from the hub or from `path`.

    Args:
        path: a .parquet, .jsonl or .json file, or a folder of them; None reads the hub.

    Raises:
        DataError: nothing can be read, or a row has not the expected schema.
    """
    where = str(path or source.repository)
    for number, row in enumerate(_rows(source, path), start=1):
        try:
            problem = source.problem(source.row.model_validate(row))
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in fault["loc"])
            raise DataError(
                f"row {number} of {where} has another schema, {place}: {fault['msg'].lower()}; its columns are "
                f"{', '.join(row)}, expected are {', '.join(source.row.model_fields)}"
            ) from None
        except DataError as error:
            raise DataError(f"row {number} of {where}: {error}") from None
        if not problem.statement or not problem.answer:
            raise DataError(f"row {number} of {where} has an empty problem or answer")
        yield problem


def _rows(source: Source, path: Path | None) -> Iterator[dict[str, Any]]:
    """Raw rows, streamed: DAPO-MATH-17k has each of its problems a hundred times."""
    import datasets

    try:
        if path is None:
            yield from datasets.load_dataset(source.repository, split=source.split, streaming=True)
        else:
            kind, files = _local_files(path)
            yield from datasets.load_dataset(kind, data_files=files, split="train", streaming=True)
    except DataError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if path is None:
            raise DataError(
                f"{source.repository} could not be read from the hub ({reason}); download it and pass --source "
                "with the file or folder"
            ) from error
        raise DataError(f"{path} could not be read ({reason})") from error


def _local_files(path: Path) -> tuple[str, list[str]]:
    """Loader of `datasets` for the file or folder `path`, and its files."""
    if not path.exists():
        raise DataError(f"there is no {path}")
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [file for file in files if file.suffix.removeprefix(".") in FORMATS and file.is_file()]
    kinds = {FORMATS[file.suffix.removeprefix(".")] for file in files}
    if len(kinds) != 1:
        found = "both" if kinds else "neither"
        raise DataError(f"{path} must be or hold either .parquet or .jsonl files, it has {found}")
    return kinds.pop(), [str(file) for file in files]
