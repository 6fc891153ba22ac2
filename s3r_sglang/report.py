"""What the command line prints: progress bars and tables."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from s3r_sglang.doctor import Check
from s3r_sglang.rollout import Response, Summary

# Where the output is no terminal, rich draws a bar once, when it ends.
LINE_SECONDS = 30.0


def waiting(console: Console, text: str) -> AbstractContextManager[object]:
    """A spinner beside `text`; where the output is no terminal, a line."""
    if not console.is_interactive:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return console.status(escape(text))


@contextmanager
def progress(console: Console, *columns: ProgressColumn) -> Iterator[Progress]:
    """A live bar with counts and times; where the output is no terminal, a line every `LINE_SECONDS`.

    Args:
        columns: what else to show, after the counts.
    """
    live = console.is_interactive
    bar = Progress(
        TextColumn("{task.description}"),
        *([BarColumn()] if live else []),
        MofNCompleteColumn(),
        *columns,
        TimeElapsedColumn(),
        *([TimeRemainingColumn()] if live else []),
        console=console,
    )
    with bar, nullcontext() if live else _printed(console, bar):
        yield bar


@contextmanager
def _printed(console: Console, bar: Progress) -> Iterator[None]:
    """Within it, a line of `bar` every `LINE_SECONDS`, also while nothing advances."""
    ended = threading.Event()

    def print_lines() -> None:
        while not ended.wait(LINE_SECONDS):
            console.print(bar)

    printer = threading.Thread(target=print_lines, daemon=True)
    printer.start()
    try:
        yield
    finally:
        ended.set()
        printer.join()


def check_row(check: Check) -> str:
    """One finding of `s3r doctor`, in rich markup."""
    mark = "[green]ok [/]" if check.ok else "[red]BAD[/]"
    advice = "" if check.ok or not check.remedy else f"\n      -> {check.remedy}"
    return f"{mark} {check.name}: {check.detail}{advice}"


def summary_table(columns: dict[str, Summary], draft_length: int) -> Table:
    """Totals of one or more runs of a job side by side; a second column brings the ratio to it.

    Args:
        columns: title of the column -> totals; the first is the run with speculation.
        draft_length: k of the first column.
    """
    table = Table(title="Rollout", show_lines=False)
    table.add_column("")
    for title in columns:
        table.add_column(title, justify="right")
    runs = list(columns.values())
    rows: list[tuple[str, list[str]]] = [
        ("responses", [f"{run.responses}" for run in runs]),
        ("output tokens", [f"{run.tokens}" for run in runs]),
        ("generation time (s)", [f"{run.seconds:.1f}" for run in runs]),
        ("tokens/s", [f"{run.tokens_per_second:.1f}" for run in runs]),
        ("rounds", [f"{run.rounds or '-'}" for run in runs]),
        ("accept length τ (tokens per round)", [_number(run.accept_length) for run in runs]),
        ("mean draft acceptance", [_mean(run.acceptance(draft_length)) for run in runs]),
    ]
    if len(runs) == 2:
        table.add_column("ratio", justify="right")
        ratio = runs[0].tokens_per_second / runs[1].tokens_per_second
        rows[3][1].append(f"{ratio:.2f}x")
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def acceptance_table(acceptance: Sequence[float]) -> Table:
    """P(accepted) of each draft position."""
    table = Table(title="Acceptance by draft position")
    for position in range(1, len(acceptance) + 1):
        table.add_column(str(position), justify="right")
    table.add_row(*(f"{share:.1%}" for share in acceptance))
    return table


def excerpt(response: Response, width: int = 320) -> str:
    """The head of a response, on one line."""
    text = " ".join(response.text.split())
    return f"{response.prompt_id} [{response.group_index}]: {text[:width]}{'…' if len(text) > width else ''}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mean(acceptance: Sequence[float]) -> str:
    return f"{sum(acceptance) / len(acceptance):.1%}" if any(acceptance) else "-"
