"""A `KvReport` for people: one table like the paper's Table 2 with its figures beside, and a plot over time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from s3r_sglang.bench import page, paper
from s3r_sglang.bench.kv.bound import Bound, bound
from s3r_sglang.bench.kv.records import KvReport, KvRun, KvTotals
from s3r_sglang.bench.kv.workload import median_length, response_lengths

Cell = Callable[[KvRun], str]
PLOTTED = ("offload", "aimd")
BOUND_TITLE = "What is left to other schedules"


def _throughput_columns(report: KvReport) -> dict[str, Cell]:
    def gain(row: KvRun) -> str:
        ratio = report.ratio(row.variant, "ar")
        return "" if ratio is None else f"{ratio - 1:+.1%}"

    def paper_gain(row: KvRun) -> str:
        value = paper.KV_GAINS.get(row.variant)
        return "" if value is None else f"{value - 1:+.1%}"

    return {
        "": lambda row: row.title,
        "tok/s": lambda row: page.number(row.tokens_per_second),
        "over AR": gain,
        "paper": paper_gain,
        "seconds": lambda row: f"{row.seconds:.1f}",
        "τ": lambda row: "" if row.tau is None else f"{row.tau:.2f}",
        "retractions": lambda row: str(row.retractions),
    }


def _kv_columns(report: KvReport) -> dict[str, Cell]:
    def kv(cell: Callable[[KvTotals], str]) -> Cell:
        return lambda row: "" if row.kv is None else cell(row.kv)

    def paper_pages(row: KvRun) -> str:
        value = paper.KV_PAGES_PER_1000_TOKENS.get(row.variant)
        return "" if value is None else f"{value:.1f}"

    def pages(row: KvRun) -> str:
        return "" if row.pages_per_1000_tokens is None else f"{row.pages_per_1000_tokens:.1f}"

    def host_gb(kv: KvTotals) -> str:
        return f"{kv.host_pages_peak * report.job.kv_bytes_per_token / 1e9:.2f} GB"

    return {
        "": lambda row: row.title,
        "pages / 1K tokens": pages,
        "paper": paper_pages,
        "out": kv(lambda kv: str(kv.pages_out)),
        "in": kv(lambda kv: str(kv.pages_in)),
        "episodes": kv(lambda kv: str(kv.pauses)),
        "again": kv(lambda kv: str(kv.repauses)),
        "host peak": kv(host_gb),
        "restore": kv(lambda kv: f"{kv.restore_ms:.1f} ms" if kv.restores else ""),
        "fallbacks": kv(lambda kv: str(kv.recomputed)),
    }


def _bound_columns(report: KvReport) -> dict[str, Cell]:
    bounds = {row.variant: bound(row, report.job) for row in report.rows}

    def of(cell: Callable[[KvRun, KvTotals, Bound], str]) -> Cell:
        def text(row: KvRun) -> str:
            found = bounds[row.variant]
            return "" if row.kv is None or found is None else cell(row, row.kv, found)

        return text

    return {
        "": lambda row: row.title,
        "rounds": of(lambda row, kv, _: str(kv.rounds)),
        "requests per round": of(lambda row, kv, _: f"{sum(row.accept_histogram) / kv.rounds:.0f}"),
        "fixed cost": of(lambda row, kv, it: f"{1e3 * it.costs.round:.1f} ms"),
        "pool in use": of(lambda row, kv, it: "" if it.pool is None else f"{it.pool:.1%}"),
        "rounds not full": of(lambda row, kv, it: f"{it.slack:.2f} s"),
        "pauses": of(lambda row, kv, it: f"{it.pauses:.2f} s"),
        "prefills": of(lambda row, kv, it: f"{it.prefills:.2f} s ({kv.prefills})"),
        "gain without all": of(lambda row, kv, it: f"{it.gain - 1:+.1%}"),
    }


def _sections(report: KvReport) -> dict[str, dict[str, Cell]]:
    sections = {"Generation throughput": _throughput_columns(report), "KV traffic": _kv_columns(report)}
    if any(bound(row, report.job) for row in report.rows):
        sections[BOUND_TITLE] = _bound_columns(report)
    return sections


def findings(report: KvReport) -> list[tuple[str, str, str]]:
    """(relation, here, in the paper) for each that section 6.5 states and that both its rows were run for."""
    return [
        (name, f"{value:.3f}", f"{paper.KV_FINDINGS[name]:.3f}")
        for name, value in report.findings.items()
        if value is not None
    ]


def check_line(report: KvReport) -> str:
    """One sentence on what every run was checked for."""
    line = (
        f"In every run each of the {report.job.requests} requests was answered once, with exactly its length, "
        "and nothing was left in host memory."
    )
    errors = [f"{row.title} {row.logprob_error:.1e}" for row in report.rows if row.logprob_error is not None]
    if errors:
        line += " Mean logprob error against a dense prefill: " + ", ".join(errors) + "."
    for fault in report.faults:
        line += f" FAILED: {fault}."
    return line


def tables(report: KvReport) -> list[Table]:
    """For the terminal."""
    return [
        page.terminal_table(f"{title}: {report.title}", columns, report.rows)
        for title, columns in _sections(report).items()
    ]


def workload_line(report: KvReport) -> str:
    """What was run."""
    job = report.job
    pool_gb = job.pool_tokens * job.kv_bytes_per_token / 1e9
    longest = max(response_lengths(job.requests, job.longest, job.seed, job.median))
    median = median_length(job.longest, job.median)
    return (
        f"{job.requests} responses in groups of {job.group_size}, {job.tokens} tokens in all, log-normal lengths "
        f"of median {median:.0f} up to {job.longest} (longest {longest}; hidden from the scheduler), "
        f"prompts of {job.prompt_length} ({job.prompts}); {job.slots} slots; KV pool of {job.pool_tokens} tokens "
        f"({page.number(pool_gb)} GB), peak demand {job.peak_demand / job.pool_tokens:.2f} times as much"
    )


def markdown(report: KvReport, plot: str | None) -> str:
    """A page for docs/results; `plot` is the file name of a picture next to it."""
    lines = [f"# s3r bench-kv: {report.title}", ""]
    lines += page.imposed_acceptance_note(report.job.imposed_acceptance)
    commits = sorted({row.git_commit for row in report.rows})
    lines += [
        *page.provenance_lines(report, ", ".join(commits)),
        f"- {workload_line(report)}",
        f"- {check_line(report)}",
        "",
    ]
    sections = _sections(report)
    for title, columns in sections.items():
        lines += page.section(title, columns, report.rows)
    lines += ["## Relations of the paper's section 6.5", ""]
    lines += page.markdown_table(["", "here", "paper"], findings(report))
    lines += [
        "",
        "Throughput: all response tokens over the time from the first request sent to the last response received, "
        "its tail included. Episodes: requests paused and copied to host memory; again: the same request not for "
        "the first time; fallbacks: requests that had to be recomputed all the same. A page is the KV of one "
        "token here; the paper (arXiv 2610.13202, Table 2: Qwen3-1.7B, ten RL steps, up to 16K tokens) does not "
        "say what its pages hold, so the ratio of two rows is what compares. Its AR row is another engine (vLLM). "
        "The tokens that SGLang's own admission expects of a request (AR, Recompute) are scaled with the lengths.",
    ]
    if BOUND_TITLE in sections:
        lines += [
            "",
            f"{BOUND_TITLE}, if the order in which requests start is the same: all read the same KV and do the "
            "same work per request, so one can only save rounds (each has a fixed cost), pauses and forwards that "
            "prefill. The costs are fitted to a row's samples (least squares, none negative). Rounds not full: "
            "the fixed cost of those that a full pool or full slots would have saved while requests waited. The "
            "last column counts all three as free: no schedule reaches it.",
        ]
    if plot:
        lines += ["", f"![Concurrency limit, utilisation and backlog over time]({plot})"]
    return "\n".join(lines) + "\n"


def plot(report: KvReport, path: Path) -> None:
    """C, active and paused requests above utilisation, over the time of a rollout.

    Raises:
        ImportError: matplotlib is not installed (the `bench` extra).
    """
    from matplotlib.figure import Figure

    runs = [report.runs[key] for key in PLOTTED if key in report.runs and report.runs[key].samples]
    figure = Figure(figsize=(2 + 5 * max(1, len(runs)), 6), layout="constrained")
    figure.suptitle(report.title)
    axes = figure.subplots(2, max(1, len(runs)), sharex="col", sharey="row", squeeze=False)
    for (above, below), run in zip(axes.T, runs, strict=False):
        _plot_requests(above, run)
        _plot_utilization(below, run)
    figure.savefig(path, dpi=120)


def _plot_requests(axes: Any, run: KvRun) -> None:
    times = [sample.seconds for sample in run.samples]
    for name, label, style in (
        ("limit", "limit C", {"color": "black", "linestyle": "--", "drawstyle": "steps-post"}),
        ("active", "active", {"color": "tab:blue"}),
        ("waiting", "waiting", {"color": "darkgray"}),
        ("paused", "paused (backlog O)", {"color": "tab:red"}),
    ):
        axes.plot(times, [getattr(sample, name) for sample in run.samples], label=label, **style)
    # All wait at first, in numbers that would flatten the other lines.
    most = 1.4 * max(sample.limit for sample in run.samples)
    axes.set(
        title=f"{run.title}: {page.number(run.tokens_per_second)} tok/s", ylabel="requests", ylim=(0, most)
    )
    axes.legend(fontsize="small", loc="upper center", ncols=4)


def _plot_utilization(axes: Any, run: KvRun) -> None:
    axes.plot([s.seconds for s in run.samples], [s.utilization for s in run.samples], color="tab:green")
    if run.variant == "aimd":
        for name, style in (("low", ":"), ("high", "--")):
            bound = run.s3r_config[f"aimd_{name}_utilization"]
            axes.axhline(bound, color="gray", linewidth=0.8, linestyle=style, label=f"u_{name} {bound:g}")
        axes.legend(fontsize="small", loc="lower left")
    axes.set(ylim=(0, 1.05), xlabel="seconds", ylabel="share of the KV pool in use")
