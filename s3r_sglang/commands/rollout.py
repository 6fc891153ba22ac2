"""`s3r rollout`: check the input, run the job with one engine or two, write and print the results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.progress import TextColumn

from s3r_sglang import cpu, launch, prompts, report
from s3r_sglang.config import ConfigError
from s3r_sglang.faults import sentence
from s3r_sglang.processes import bind_children, ended_by_interrupts
from s3r_sglang.rollout import Job, Response, RolloutError, Summary, kv_stats, run
from s3r_sglang.server.protocol import Sampling

NOT_STARTED = "stopped before the engine was ready"
FAULTS = (prompts.PromptError, RolloutError, ConfigError, FileExistsError, FileNotFoundError)


@dataclass(frozen=True)
class Request:
    """The command's own options; what they mean is in `s3r rollout --help`."""

    model: Path
    prompts: Path
    out: Path
    group_size: int
    sampling: dict[str, Any]
    seed: int
    concurrency: int
    compare: bool
    force: bool

    @property
    def dense_out(self) -> Path:
        """Where `--compare` writes the autoregressive responses."""
        return self.out.with_suffix(f".autoregressive{self.out.suffix}")


def execute(request: Request, engine_argv: list[str], console: Console) -> None:
    """Run the command; raises one of `FAULTS` with a message for the user."""
    _check_options(request)
    faithful = launch.configuration(engine_argv).faithful
    if request.compare and not faithful:
        raise ConfigError(
            "--compare shows two engines that sample from one law, and responses of --s3r-mode direct have "
            "another: drop one of the two"
        )
    job = Job(
        _encoded_prompts(request), request.group_size, request.sampling, request.seed, request.concurrency
    )
    request.out.parent.mkdir(parents=True, exist_ok=True)
    bind_children()

    examples: dict[str | int, Response] = {}
    summary, draft_length = _run(
        "self-sparse",
        request.model,
        engine_argv,
        True,
        job,
        request.out,
        console,
        lambda row: examples.setdefault(row.prompt_id, row),
    )
    columns = {"S3R" if faithful else "sparse policy, unverified": summary}
    if request.compare:
        columns["autoregressive"], _ = _run(
            "autoregressive", request.model, engine_argv, False, job, request.dense_out, console
        )
    out = Console()
    out.print(report.summary_table(columns, draft_length))
    if faithful:
        out.print(report.acceptance_table(summary.acceptance(draft_length)))
    for replica, stats in enumerate(summary.kv):
        out.print(f"KV of replica {replica}: {stats.line()}", highlight=False)
    for response in examples.values():
        out.print(report.excerpt(response), markup=False, highlight=False)


def _check_options(request: Request) -> None:
    for out in (request.out, request.dense_out) if request.compare else (request.out,):
        if not out.exists():
            continue
        # A run that ended before its first group was complete leaves an empty file.
        if not request.force and out.stat().st_size:
            raise FileExistsError(f"{out} exists; give another --out, or --force to overwrite it")
        if request.prompts.exists() and out.samefile(request.prompts):
            raise FileExistsError(f"{out} is the file of the prompts; give another --out")
    try:
        Sampling.model_validate(request.sampling)
    except ValidationError as error:
        raise ConfigError(sentence(error, Sampling)) from None


def _encoded_prompts(request: Request) -> list[prompts.EncodedPrompt]:
    rows = prompts.load(request.prompts)
    if not (request.model / "config.json").is_file():
        raise FileNotFoundError(f"{request.model} is not a model folder; `s3r model fetch smollm2` makes one")
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(request.model)
    tokenizer = AutoTokenizer.from_pretrained(request.model)
    return prompts.encode(rows, tokenizer, config.max_position_embeddings, request.sampling["max_new_tokens"])


def _run(
    title: str,
    model: Path,
    engine_argv: list[str],
    speculative: bool,
    job: Job,
    out: Path,
    console: Console,
    on_response=lambda row: None,
) -> tuple[Summary, int]:
    """One engine from start to shutdown; returns the totals and the draft length (0: no speculation)."""
    argv = ["--model-path", str(model), "--log-level", "error", *engine_argv]
    starting = f"{title}: starting the engine for {model}"
    with ended_by_interrupts(NOT_STARTED), report.waiting(console, starting):
        engine = launch.open_engine(launch.arguments(argv, cpu.has_gpu(), speculative))
    try:
        counts = TextColumn("responses, {task.fields[tokens]} tokens")
        with report.progress(console, counts) as bar, out.open("w", encoding="utf-8") as file:
            task = bar.add_task(title, total=len(job.prompts) * job.group_size, tokens=0)

            def advance(response: Response) -> None:
                tokens = bar.tasks[task].fields["tokens"] + len(response.token_ids)
                bar.update(task, advance=1, tokens=tokens)
                on_response(response)

            summary = run(engine, job, file, advance)
            summary.kv = kv_stats(engine)
    except KeyboardInterrupt:
        console.print(f"stopped: {out} holds the groups that were complete", highlight=False, soft_wrap=True)
        raise
    finally:
        engine.shutdown()
    return summary, engine.server_args.speculative_num_steps or 0
