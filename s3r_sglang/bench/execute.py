"""`s3r bench`: from the options to a job, and from its outcome to a report and files."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from s3r_sglang import cpu, launch
from s3r_sglang.bench import load, page, paper, provenance, render, run
from s3r_sglang.bench.load import LoadError, Setting
from s3r_sglang.bench.probe import ProbeConfig
from s3r_sglang.bench.records import Report
from s3r_sglang.config import ConfigError, S3RConfig

# Both engines get the same share of the GPU's memory. SGLang's own choice depends on speculation.
MEMORY = ["--mem-fraction-static", "0.85"]


class IncorrectError(RuntimeError):
    """The responses that were timed are not those of the dense policy."""


FAULTS = (LoadError, FileNotFoundError, IncorrectError, ConfigError)


@dataclass(frozen=True)
class Options:
    """The command's own options; what they mean is in `s3r bench --help`."""

    model: str
    load_format: str
    settings: str
    paper_table: bool
    new_tokens: int
    settle_tokens: int
    repeats: int
    imposed_acceptance: str | None
    text: Path | None
    sampling: dict[str, Any]
    dtype: str | None
    out: Path | None
    profile: bool


def execute(options: Options, engine_argv: list[str], console: Console) -> Report:
    """Run the command; raises one of `FAULTS` with a message for the user."""
    config = launch.configuration(engine_argv)
    require_exact(config, "s3r bench")
    with model_folder(options.model, options.load_format) as folder, console.status("starting") as status:
        job = _job(options, folder, engine_argv, config.draft_length)
        outcome = run.run(job, status.update)
    report = _report(options, job, outcome)
    for table in render.tables(report):
        console.print(table)
    console.print(render.correctness_line(report), highlight=False)
    if options.out is not None:
        _write(report, options.out, console)
    if not report.correctness.passed:
        raise IncorrectError("the responses of S3R are not those of the dense policy: no speed counts")
    return report


def require_exact(config: S3RConfig, command: str) -> None:
    """Raise ConfigError if responses would be the sparse policy's: their speed is not that of S3R."""
    if not config.faithful:
        raise ConfigError(
            f"{command} compares engines that sample from one law: --s3r-mode must be exact, not {config.mode}"
        )


@contextlib.contextmanager
def model_folder(model: str, load_format: str) -> Iterator[Path]:
    """The model's folder, made on the spot for one of the paper's shapes; raises LoadError."""
    if model not in paper.SHAPES:
        yield Path(model)
        return
    if load_format != "dummy":
        raise LoadError(f"{model} is a shape without weights: add --load-format dummy")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / model
        paper.write_model(model, folder)
        yield folder


def _job(options: Options, folder: Path, engine_argv: list[str], draft_length: int) -> run.Job:
    settings = load.parse_settings(options.settings)
    if options.paper_table:
        # The longest prompts first: the shorter ones are their heads and then lie in the radix cache.
        rows = sorted(paper.TABLES_6_AND_7, key=lambda row: (-row.context, -row.batch_size))
        settings = [Setting(row.batch_size, row.context) for row in rows]
    if options.new_tokens <= options.settle_tokens:
        raise LoadError("--new-tokens must exceed --settle-tokens: nothing would be left to time")
    most = max(run.CHECK_RESPONSES, *(setting.batch_size for setting in settings))
    longest = max(setting.context for setting in settings)
    config = paper.read_config(folder)
    require_positions(
        config,
        longest + options.new_tokens,
        f"prompts of {longest} and {options.new_tokens} new tokens",
        "lower --context (--sweep) or --new-tokens",
    )
    if options.text is not None:
        prompts = load.text_prompts(folder, options.text, most, longest)
    else:
        prompts = load.random_prompts(config["vocab_size"], most, longest)
    if options.profile and not cpu.has_gpu():
        raise LoadError("--profile traces GPU kernels: there is no GPU")
    return run.Job(
        model=folder,
        load_format=options.load_format,
        dtype=options.dtype,
        engine_argv=with_memory(engine_argv),
        settings=settings,
        new_tokens=options.new_tokens,
        settle_tokens=options.settle_tokens,
        repeats=options.repeats,
        sampling=options.sampling,
        prompts=prompts,
        imposed_acceptance=parse_profile(options.imposed_acceptance, draft_length),
        profile=options.profile,
    )


def require_positions(config: dict[str, Any], needed: int, what: str, advice: str) -> None:
    """Raise LoadError if `what`, which takes `needed` positions, exceeds those of the model."""
    positions = config.get("max_position_embeddings", needed)
    if needed > positions:
        raise LoadError(f"{what} do not fit the model's {positions} positions: {advice}")


def with_memory(engine_argv: list[str]) -> list[str]:
    """`engine_argv`, with a share of the GPU's memory unless it names one."""
    if not cpu.has_gpu() or any(word.startswith(MEMORY[0]) for word in engine_argv):
        return engine_argv
    return [*engine_argv, *MEMORY]


def parse_profile(text: str | None, draft_length: int) -> tuple[float, ...] | None:
    """An acceptance profile by name, or from "0.958,0.883,…", for that many drafts; raises LoadError."""
    if text is None:
        return None
    profile = paper.PROFILES.get(text) or _numbers(text)
    if len(profile) != draft_length:
        raise LoadError(
            f"--imposed-acceptance has {len(profile)} positions, but a round drafts {draft_length} tokens: give "
            f"one for each, or add --speculative-num-steps {len(profile)}"
        )
    return profile


def _numbers(text: str) -> tuple[float, ...]:
    try:
        profile = tuple(float(word) for word in text.split(","))
        return ProbeConfig(imposed_acceptance=profile).imposed_acceptance or ()
    except ValidationError as error:
        raise LoadError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    except ValueError:
        names = " or ".join(paper.PROFILES)
        raise LoadError(f"--imposed-acceptance {text!r} is neither {names} nor a list of numbers") from None


def _report(options: Options, job: run.Job, outcome: run.Outcome) -> Report:
    return Report(
        **provenance.collect(),
        model={
            "name": outcome.shape.name,
            "weight_bytes": outcome.shape.weight_bytes,
            "kv_bytes_per_token": outcome.shape.kv_bytes_per_token,
        },
        load_format=options.load_format,
        prompts=options.text.name if options.text else "random tokens",
        sampling=options.sampling,
        server_args=outcome.server_args,
        s3r_config=outcome.config.model_dump(),
        imposed_acceptance=job.imposed_acceptance,
        correctness=outcome.correctness,
        settings=tuple(outcome.settings),
    )


def _write(report: Report, folder: Path, console: Console) -> None:
    drawn = page.write(report, folder, render.plot, render.markdown)
    if not drawn:
        console.print("no plot: pip install 's3r-sglang[bench]' brings matplotlib", highlight=False)
    console.print(f"wrote {folder}/report.json, report.md" + (", report.png" if drawn else ""))
