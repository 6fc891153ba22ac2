"""`s3r bench`: from the options to a job, and from its outcome to a report and files."""

import contextlib
import datetime
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from s3r_sglang import cpu
from s3r_sglang.bench import load, paper, render, run
from s3r_sglang.bench.load import LoadError, Setting
from s3r_sglang.bench.probe import ProbeConfig
from s3r_sglang.bench.records import Report

# Both engines get the same share of the GPU's memory. SGLang's own choice depends on speculation.
MEMORY = ["--mem-fraction-static", "0.85"]
VERSIONS = ("s3r-sglang", "sglang", "torch", "triton", "transformers", "sgl-kernel", "flashinfer-python")


class IncorrectError(RuntimeError):
    """The responses that were timed are not those of the dense policy."""


FAULTS = (LoadError, FileNotFoundError, IncorrectError)


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
    with _model_folder(options) as folder, console.status("starting") as status:
        job = _job(options, folder, engine_argv)
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


@contextlib.contextmanager
def _model_folder(options: Options) -> Iterator[Path]:
    """The model's folder, made on the spot for one of the paper's shapes."""
    if options.model not in paper.SHAPES:
        yield Path(options.model)
        return
    if options.load_format != "dummy":
        raise LoadError(f"{options.model} is a shape without weights: add --load-format dummy")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / options.model
        paper.write_model(options.model, folder)
        yield folder


def _job(options: Options, folder: Path, engine_argv: list[str]) -> run.Job:
    settings = load.parse_settings(options.settings)
    if options.paper_table:
        # The longest prompts first: the shorter ones are their heads and then lie in the radix cache.
        rows = sorted(paper.TABLES_6_AND_7, key=lambda row: (-row.context, -row.batch_size))
        settings = [Setting(row.batch_size, row.context) for row in rows]
    if options.new_tokens <= options.settle_tokens:
        raise LoadError("--new-tokens must exceed --settle-tokens: nothing would be left to time")
    most = max(run.CHECK_RESPONSES, *(setting.batch_size for setting in settings))
    longest = max(setting.context for setting in settings)
    if options.text is not None:
        prompts = load.text_prompts(folder, options.text, most, longest)
    else:
        prompts = load.random_prompts(paper.read_config(folder)["vocab_size"], most, longest)
    if options.profile and not cpu.has_gpu():
        raise LoadError("--profile traces GPU kernels: there is no GPU")
    memory = MEMORY if cpu.has_gpu() and not any(w.startswith(MEMORY[0]) for w in engine_argv) else []
    return run.Job(
        model=folder,
        load_format=options.load_format,
        dtype=options.dtype,
        engine_argv=[*engine_argv, *memory],
        settings=settings,
        new_tokens=options.new_tokens,
        settle_tokens=options.settle_tokens,
        repeats=options.repeats,
        sampling=options.sampling,
        prompts=prompts,
        imposed_acceptance=parse_profile(options.imposed_acceptance),
        profile=options.profile,
    )


def parse_profile(text: str | None) -> tuple[float, ...] | None:
    """An acceptance profile by name, or from "0.958,0.883,…"; raises LoadError."""
    if text is None:
        return None
    if text in paper.PROFILES:
        return paper.PROFILES[text]
    try:
        profile = tuple(float(word) for word in text.split(","))
        return ProbeConfig(imposed_acceptance=profile).imposed_acceptance
    except ValidationError as error:
        raise LoadError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    except ValueError:
        names = " or ".join(paper.PROFILES)
        raise LoadError(f"--imposed-acceptance {text!r} is neither {names} nor a list of numbers") from None


def _report(options: Options, job: run.Job, outcome: run.Outcome) -> Report:
    return Report(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(["s3r", *sys.argv[1:]]),
        git_commit=_git_commit(),
        machine=_machine(),
        versions={"python": platform.python_version(), **_versions()},
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


def _machine() -> dict[str, Any]:
    import torch

    if not cpu.has_gpu():
        return {"device": f"CPU ({platform.machine()})", "count": torch.get_num_threads()}
    return {"device": torch.cuda.get_device_name(), "count": torch.cuda.device_count()}


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _git_commit() -> str:
    """Commit of the checkout that this package runs from, marked if it has changes.

    A copy without `.git` is named by the environment variable S3R_COMMIT.
    """
    if "S3R_COMMIT" in os.environ:
        return os.environ["S3R_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _write(report: Report, folder: Path, console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    picture: str | None = "report.png"
    try:
        render.plot(report, folder / "report.png")
    except ImportError:
        picture = None
        console.print("no plot: pip install 's3r-sglang[bench]' brings matplotlib", highlight=False)
    (folder / "report.md").write_text(render.markdown(report, picture), encoding="utf-8")
    console.print(f"wrote {folder}/report.json, report.md" + (", report.png" if picture else ""))
