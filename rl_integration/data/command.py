"""`s3r data …`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

console = Console(stderr=True)
app = typer.Typer(no_args_is_help=True, help="Prompts with answers from the paper's data sets.")


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="dapo-math-17k, aime26, arxiv-math or arithmetic")],
    out: Annotated[Path, typer.Option(help="JSON lines: id, messages, answer, datasource.")],
    source: Annotated[
        Path | None, typer.Option(help="Local .parquet or .jsonl file, or folder; default: the hub.")
    ] = None,
    style: Annotated[str, typer.Option(help="How the answer is asked for: dapo or boxed.")] = "dapo",
    seed: Annotated[int, typer.Option(help="Of the order and the split.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Keep only so many problems.")] = None,
    holdout: Annotated[int, typer.Option(min=0, help="Problems for <out>.holdout.jsonl instead.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite.")] = False,
) -> None:
    """Write a data set as prompts for `s3r rollout`, OpenRLHF and the GRPO example."""
    from s3r_sglang.rl_integration.data import prepare as module

    try:
        if style not in module.STYLES:
            raise module.DataError(f"--style must be one of {', '.join(module.STYLES)}, not {style!r}")
        done = module.prepare(
            name, out, source=source, style=style, seed=seed, limit=limit, holdout=holdout, force=force
        )
    except module.DataError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(
        f"{out}: {done.written} problems, {done.held_out} held out, of {done.rows} rows "
        f"({done.duplicates} duplicates; {done.conflicts} problems with several answers left out)",
        highlight=False,
        soft_wrap=True,
    )
    if done.paper_rows not in (None, done.written + done.held_out):
        console.print(
            f"[yellow]note:[/] the paper used {done.paper_rows} problems of {name}.", soft_wrap=True
        )


@app.command()
def score(
    rollouts: Annotated[Path, typer.Argument(help="Output of `s3r rollout` on prepared prompts.")],
) -> None:
    """Grade responses: pass@1, averaged over the problems of each data set."""
    from s3r_sglang.rl_integration.data import score as module

    try:
        scores = module.score(rollouts)
    except module.DataError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    for name, found in scores.items():
        error_text = "" if found.error is None else f" ± {found.error:.2f}"
        print(
            f"{name}: pass@1 {found.pass_at_1:.2f}%{error_text} ({found.problems} problems, {found.responses} "
            f"responses, {found.truncated:.1%} truncated)"
        )
