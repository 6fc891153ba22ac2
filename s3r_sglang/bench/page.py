"""What the reports of all benchmarks have in common: tables, notes and files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from rich.table import Table

Row = TypeVar("Row")
Columns = Mapping[str, Callable[[Row], str]]


def number(value: float) -> str:
    """A rate or a size: whole from 100 on, with three digits below."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def terminal_table(title: str, columns: Columns[Row], rows: Iterable[Row]) -> Table:
    """A table for the terminal; a column without a name holds titles and is never wrapped."""
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=not name)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def section(title: str, columns: Columns[Row], rows: Iterable[Row]) -> list[str]:
    """Lines of a Markdown section that is one table, with an empty line behind."""
    body = ([cell(row) for cell in columns.values()] for row in rows)
    return [f"## {title}", "", *markdown_table(list(columns), body), ""]


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows)]


def imposed_acceptance_note(profile: Sequence[float] | None) -> list[str]:
    """Lines that warn of imposed acceptance, where there is one."""
    if not profile:
        return []
    shares = ", ".join(f"{share:.3f}" for share in profile)
    return [
        f"**Imposed acceptance**: drafts are accepted by position with probability {shares}, whatever the "
        "model says. All stages run; the responses are not samples of the policy.",
        "",
    ]


def provenance_lines(report: Any, commit: str) -> list[str]:
    """When, from which commit, by which command, on what and with which versions."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return [
        f"- {report.created}, commit {commit}",
        f"- `{report.command}`",
        f"- {report.machine['count']} x {report.machine['device']}; {versions}",
    ]


def write(
    report: BaseModel,
    folder: Path,
    plot: Callable[[Any, Path], None],
    markdown: Callable[[Any, str | None], str],
) -> bool:
    """Write report.json, report.md and report.png to `folder`; whether there is a plot, which takes matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    picture: str | None = "report.png"
    try:
        plot(report, folder / "report.png")
    except ImportError:
        picture = None
    (folder / "report.md").write_text(markdown(report, picture), encoding="utf-8")
    return picture is not None
