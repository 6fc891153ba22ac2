"""`s3r bench-kv`: from the options to a job, from variant to variant, and to a report and files."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.status import Status

from s3r_sglang import launch
from s3r_sglang.bench import execute as bench
from s3r_sglang.bench import load, page, paper, provenance, traffic
from s3r_sglang.bench.kv import render, run
from s3r_sglang.bench.kv.records import VARIANTS, KvJob, KvReport, KvRun, Variant
from s3r_sglang.bench.kv.workload import Workload, peak_demand
from s3r_sglang.bench.load import LoadError
from s3r_sglang.config import ConfigError

FAULTS = (*bench.FAULTS, run.AnswerError)


@dataclass(frozen=True)
class Options:
    """The command's own options; what they mean is in `s3r bench-kv --help`."""

    model: str
    load_format: str
    variants: str
    requests: int
    group_size: int
    slots: int
    prompt_length: int
    max_length: int
    median_length: int | None
    pressure: float
    imposed_acceptance: str | None
    text: Path | None
    seed: int
    dtype: str | None
    out: Path | None
    force: bool


def execute(options: Options, engine_argv: list[str], console: Console) -> KvReport:
    """Run the command; raises one of `FAULTS` with a message for the user.

    The report is written after every variant, and takes over the rows that the output folder already has for
    the same job, which are not run again unless forced: an ablation may be run in pieces, or go on.
    """
    keys = parse_variants(options.variants)
    for key in keys:
        _check_arguments(VARIANTS[key], options.slots, engine_argv)
    with bench.model_folder(options.model, options.load_format) as folder:
        job, workload = _job(options, folder, engine_argv)
        runs = _earlier_runs(options.out, job)
        report = KvReport(**provenance.collect(), job=job, runs=runs)
        console.print(render.workload_line(report), highlight=False)
        for key in keys:
            if key in runs and not options.force:
                console.print(
                    f"{runs[key].title}: kept from {options.out} (--force runs it again)", highlight=False
                )
                continue
            with console.status(VARIANTS[key].title(job.slots)) as status:
                found = run.run_variant(job, key, folder, workload, _progress(console, status))
            console.print(
                f"{found.title}: {page.number(found.tokens_per_second)} tok/s, {found.seconds:.1f} s",
                highlight=False,
            )
            report = report.model_copy(update={"runs": report.runs | {key: found}})
            if options.out is not None:
                page.write(report, options.out, render.plot, render.markdown)
    _show(report, options.out, console)
    if report.faults:
        raise bench.IncorrectError("; ".join(report.faults))
    return report


def _check_arguments(variant: Variant, slots: int, engine_argv: list[str]) -> None:
    """Raise ConfigError if the row would fail to start, or be another one than its title says."""
    if variant.policy is None:
        return
    config = launch.configuration([*run.policy_argv(variant, slots), *engine_argv])
    bench.require_exact(config, "s3r bench-kv")
    limit = variant.limit(slots) if variant.share < 1 else None
    if (config.kv_policy, config.kv_limit) != (variant.policy, limit):
        raise ConfigError("each row sets --s3r-kv-policy and --s3r-kv-limit itself: drop them (--variants)")


def parse_variants(text: str) -> list[str]:
    """Keys of VARIANTS from "ar,aimd" or "all"; raises LoadError."""
    if text == "all":
        return list(VARIANTS)
    keys = [word.strip() for word in text.split(",")]
    for key in keys:
        if key not in VARIANTS:
            raise LoadError(f"{key!r} is none of {', '.join(VARIANTS)}")
    return keys


def _job(options: Options, folder: Path, engine_argv: list[str]) -> tuple[KvJob, Workload]:
    config = paper.read_config(folder)
    shape = traffic.ModelShape.read(folder, options.dtype)
    groups = math.ceil(options.requests / options.group_size)
    if options.text is not None:
        prompts = load.text_prompts(folder, options.text, groups, options.prompt_length)
    else:
        prompts = load.random_prompts(shape.vocab_size, groups, options.prompt_length, options.seed)
    workload = Workload.make(
        prompts,
        requests=options.requests,
        group_size=options.group_size,
        longest=options.max_length,
        median=options.median_length,
        seed=options.seed,
    )
    bench.require_positions(
        config,
        workload.context,
        f"prompts of {options.prompt_length} and responses of {options.max_length} tokens",
        "lower --max-length",
    )
    job = KvJob(
        model=shape.name,
        load_format=options.load_format,
        dtype=options.dtype,
        engine_argv=tuple(bench.with_memory(engine_argv)),
        imposed_acceptance=bench.parse_profile(
            options.imposed_acceptance, launch.configuration(engine_argv).draft_length
        ),
        prompts=options.text.name if options.text else "random tokens",
        requests=options.requests,
        group_size=options.group_size,
        slots=options.slots,
        prompt_length=options.prompt_length,
        longest=options.max_length,
        median=options.median_length,
        pressure=options.pressure,
        seed=options.seed,
        pool_tokens=workload.pool(options.slots, options.pressure),
        peak_demand=peak_demand([options.prompt_length] * options.requests, workload.lengths, options.slots),
        tokens=workload.tokens,
        kv_bytes_per_token=shape.kv_bytes_per_token,
    )
    return job, workload


def _earlier_runs(out: Path | None, job: KvJob) -> dict[str, KvRun]:
    """Rows of the report in `out`; raises LoadError if they are of another job."""
    if out is None or not (out / "report.json").exists():
        return {}
    try:
        report = KvReport.model_validate_json((out / "report.json").read_text(encoding="utf-8"))
    except ValidationError:
        raise LoadError(f"{out}/report.json is not of s3r bench-kv: choose another --out") from None
    if report.job != job:
        ours, theirs = job.model_dump(), report.job.model_dump()
        names = ", ".join(name for name in ours if ours[name] != theirs[name])
        raise LoadError(f"{out}/report.json is of another job ({names} differ): choose another --out")
    return report.runs


def _progress(console: Console, status: Status) -> run.Progress:
    """The status line, or in a log a line per step with the time, which tells a slow start from a hang."""
    if console.is_terminal:
        return status.update
    begin = time.perf_counter()
    return lambda text: console.print(f"{time.perf_counter() - begin:6.1f} s  {text}", highlight=False)


def _show(report: KvReport, out: Path | None, console: Console) -> None:
    for table in render.tables(report):
        console.print(table)
    for name, here, in_paper in render.findings(report):
        console.print(f"{name}: {here} (paper {in_paper})", highlight=False)
    console.print(render.check_line(report), highlight=False)
    if out is not None:
        console.print(f"wrote {out}/report.json and report.md", highlight=False)
