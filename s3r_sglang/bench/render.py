"""A `Report` for people: tables on the terminal, a Markdown page, a plot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from s3r_sglang.bench import page, paper
from s3r_sglang.bench.records import Report, SettingResult

Cell = Callable[[SettingResult], str]


def _throughput_columns(report: Report) -> dict[str, Cell]:
    def paper_speedup(row: SettingResult) -> str:
        value = report.paper_speedup(row)
        return "" if value is None else f"{value:.2f}x"

    return {
        "B x S": lambda row: f"{row.batch_size} x {row.context}",
        "AR tok/s": lambda row: _with_range(row.autoregressive.median, row.autoregressive.range),
        "S3R tok/s": lambda row: _with_range(row.s3r.median, row.s3r.range),
        "speed-up": lambda row: f"{row.speedup:.2f}x ({row.speedup_range[0]:.2f}-{row.speedup_range[1]:.2f})",
        "paper": paper_speedup,
        "τ": lambda row: f"{row.tau:.2f}",
        "acceptance by position": lambda row: " ".join(f"{100 * share:.0f}" for share in row.acceptance),
    }


def _stage_columns(report: Report) -> dict[str, Cell]:
    def paper_break_even(row: SettingResult) -> str:
        stages = paper.stages_of(report.model["name"], row.batch_size, row.context)
        return "" if stages is None else f"{stages.break_even_tau:.2f}"

    return {
        "B x S": lambda row: f"{row.batch_size} x {row.context}",
        "T_p": lambda row: f"{row.t_p_ms:.2f}",
        "T_q": lambda row: f"{row.t_q_ms:.2f} ({row.t_q_ms / row.t_p_ms:.2f} T_p)",
        "T_V": lambda row: f"{row.t_v_ms:.2f} ({row.t_v_ms / row.t_p_ms:.2f} T_p)",
        "sample": lambda row: f"{row.stages.sample_ms:.2f}",
        "round": lambda row: f"{row.stages.round_ms:.2f}",
        "between rounds": lambda row: f"{row.stages.gap_ms:.2f} ({row.stages.gap_share:.1%})",
        "S3R tok/s by these": lambda row: page.number(row.rounds_tokens_per_second),
        "break-even τ": lambda row: f"{row.break_even_tau:.2f}",
        "paper": paper_break_even,
    }


def _paper_columns(report: Report) -> dict[str, Cell]:
    """Tables 6 and 7 of the paper beside ours, in ms."""

    def pair(ours: Callable[[SettingResult], float], name: str, digits: int = 2) -> Cell:
        def text(row: SettingResult) -> str:
            theirs = getattr(paper.stages_of(report.model["name"], row.batch_size, row.context), name)
            return f"{ours(row):.{digits}f}, {theirs:.{digits}f}"

        return text

    return {
        "B x S": lambda row: f"{row.batch_size} x {row.context}",
        "7 T_p: ours, paper": pair(lambda row: 7 * row.t_p_ms, "seven_ar_steps_ms"),
        "6 T_q": pair(lambda row: row.stages.draft_ms, "six_draft_steps_ms"),
        "T_V": pair(lambda row: row.t_v_ms, "verify_ms"),
        "break-even acceptance": pair(lambda row: row.break_even_acceptance, "break_even_acceptance", 3),
    }


def _traffic_columns() -> dict[str, Cell]:
    def cell(name: str) -> Cell:
        def text(row: SettingResult) -> str:
            step = row.traffic[name]
            read = f"{step.weight_bytes / 1e9:.1f} + {step.kv_bytes / 1e9:.1f} GB"
            return f"{read}, {step.terabytes_per_second:.2f} TB/s"

        return text

    return {
        "B x S": lambda row: f"{row.batch_size} x {row.context}",
        "AR step": cell("autoregressive"),
        "draft step": cell("draft"),
        "verify": cell("verify"),
    }


def _kernel_columns(report: Report) -> dict[str, Cell]:
    """The quantities of the paper's Table 6: attention per forward, of which an S3R round has k + 1."""

    def per_forward(row: SettingResult) -> float:
        return row.kernels["s3r"].attention_ms / (row.draft_length + 1)

    def paper_pair(row: SettingResult) -> str:
        stages = paper.stages_of(report.model["name"], row.batch_size, row.context)
        return "" if stages is None else f"{stages.ar_attention_ms:.2f} -> {stages.s3r_attention_ms:.2f}"

    def waits(row: SettingResult) -> str:
        by_engine = [row.kernels[name].host_waits or {} for name in ("autoregressive", "s3r")]
        return "; ".join(
            f"{name} {' / '.join(f'{found.get(name, 0):.2f}' for found in by_engine)}"
            for name in sorted(set().union(*by_engine))
        )

    def kinds(name: str) -> Cell:
        return lambda row: ", ".join(
            f"{kind} {time:.2f}"
            for kind, time in sorted(row.kernels[name].kind_ms.items(), key=lambda x: -x[1])
        )

    return {
        "B x S": lambda row: f"{row.batch_size} x {row.context}",
        "attention per forward, AR -> S3R": lambda row: (
            f"{row.kernels['autoregressive'].attention_ms:.2f} -> {per_forward(row):.2f}"
        ),
        "paper": paper_pair,
        "AR step": kinds("autoregressive"),
        "S3R round": kinds("s3r"),
        "GPU idle, AR / S3R": lambda row: (
            f"{row.kernels['autoregressive'].idle_share:.1%} / {row.kernels['s3r'].idle_share:.1%}"
        ),
        "the host waits, times per AR step / round": waits,
    }


def _sections(report: Report) -> dict[str, tuple[dict[str, Cell], list[SettingResult]]]:
    """Columns and rows by title."""
    rows = list(report.settings)
    sections = {
        "Throughput": (_throughput_columns(report), rows),
        "Stages (ms)": (_stage_columns(report), rows),
        "Bytes read per step (weights + KV, predicted), and the rate achieved": (_traffic_columns(), rows),
    }
    known = [row for row in rows if paper.stages_of(report.model["name"], row.batch_size, row.context)]
    if known := [row for row in known if row.draft_length == paper.DRAFT_LENGTH]:
        sections["Stage costs beside the paper's (ms)"] = (_paper_columns(report), known)
    if traced := [row for row in rows if row.kernels]:
        sections["Kernels of a traced run (ms)"] = (_kernel_columns(report), traced)
    return sections


def _with_range(median: float, spread: tuple[float, float]) -> str:
    return f"{page.number(median)} ({page.number(spread[0])}-{page.number(spread[1])})"


def correctness_line(report: Report) -> str:
    """One sentence on the greedy check."""
    found = report.correctness
    line = (
        f"Correctness {'passed' if found.passed else 'FAILED'}: {found.responses} greedy responses, "
        f"{found.tokens} tokens: {found.equal_tokens:.1%} equal up to the first difference; mean logprob error "
        f"against a dense prefill {found.s3r_logprob_error:.1e} (S3R), {found.ar_logprob_error:.1e} "
        "(autoregressive)."
    )
    if not found.informative:
        line += " With dummy weights this says little: their distributions are flat, and ties are everywhere."
    return line


def tables(report: Report) -> list[Table]:
    """For the terminal."""
    return [
        page.terminal_table(f"{title}: {report.title}", columns, rows)
        for title, (columns, rows) in _sections(report).items()
    ]


def markdown(report: Report, plot: str | None) -> str:
    """A page for docs/results; `plot` is the file name of a picture next to it."""
    lines = [f"# s3r bench: {report.title}", ""]
    lines += page.imposed_acceptance_note(report.imposed_acceptance)
    parameters = report.sampling | report.s3r_config
    config = ", ".join(f"{name}={value}" for name, value in parameters.items() if value is not None)
    lines += [
        *page.provenance_lines(report, report.git_commit),
        f"- weights: {report.load_format}; prompts: {report.prompts}; {config}",
        f"- {correctness_line(report)}",
        "",
    ]
    for title, (columns, rows) in _sections(report).items():
        lines += page.section(title, columns, rows)
    lines += [
        "Medians over repeats (lowest-highest). T_p, T_q, T_V: an autoregressive step, a draft step, the verify "
        "forward with the index refresh. The paper (arXiv 2610.13202, section F.2) measured on 2 H100 with tensor "
        "parallelism of two; its attention times are per rank.",
    ]
    if plot:
        lines += ["", f"![Throughput and round]({plot})"]
    return "\n".join(lines) + "\n"


def plot(report: Report, path: Path) -> None:
    """Throughput of both engines, and what a round is made of beside the AR steps it replaces.

    Raises:
        ImportError: matplotlib is not installed (the `bench` extra).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 + 2 * len(report.settings), 4.5), layout="constrained")
    figure.suptitle(report.title)
    left, right = figure.subplots(1, 2)
    _plot_throughput(left, report)
    _plot_rounds(right, report)
    names = [f"{row.batch_size}x{row.context}" for row in report.settings]
    for axes, title in ((left, "tokens per second"), (right, "ms per round")):
        axes.set(title=title, xticks=range(len(names)), xticklabels=names)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)


def _plot_throughput(axes: Any, report: Report) -> None:
    for shift, name in ((-0.2, "autoregressive"), (0.2, "s3r")):
        runs = [getattr(row, name) for row in report.settings]
        medians = [run.median for run in runs]
        spread = [
            [run.median - run.range[0] for run in runs],
            [run.range[1] - run.median for run in runs],
        ]
        places = [x + shift for x in range(len(runs))]
        axes.bar(places, medians, 0.4, yerr=spread, capsize=3, label=name)
    for x, row in enumerate(report.settings):
        axes.annotate(f"{row.speedup:.2f}x", (x + 0.2, row.s3r.range[1]), ha="center", va="bottom")


def _plot_rounds(axes: Any, report: Report) -> None:
    places = [x + 0.2 for x in range(len(report.settings))]
    bottoms = [0.0] * len(places)
    parts = {"draft": "draft_ms", "verify": "verify_ms", "sample": "sample_ms", "between rounds": "gap_ms"}
    for title, name in parts.items():
        heights = [getattr(row.stages, name) for row in report.settings]
        axes.bar(places, heights, 0.4, bottom=bottoms, label=title)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    steps = [row.t_p_ms * row.tau for row in report.settings]
    axes.bar([x - 0.4 for x in places], steps, 0.4, color="lightgray", label="τ AR steps")
