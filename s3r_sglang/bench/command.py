"""The options of the benchmarks. Heavy imports happen inside, so that `s3r --help` answers at once."""

from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[
    str, typer.Option(help="Hugging Face folder; with dummy weights also qwen3-8b or qwen3-1.7b.")
]
LoadFormat = Annotated[str, typer.Option(help="dummy: random weights, only config.json is read.")]
ImposedAcceptance = Annotated[
    str | None,
    typer.Option(help="Accept drafts with these probabilities by position, or paper-8b, or paper-1.7b."),
]
Text = Annotated[Path | None, typer.Option(help="Cut the prompts from this text; without it, random tokens.")]
Backend = Annotated[
    str | None, typer.Option(help="Attention backend of all engines; SGLang's choice without it.")
]
Dtype = Annotated[str | None, typer.Option(help="bfloat16, float16, float32; the model's without it.")]


def bench(
    ctx: typer.Context,
    model: Model,
    load_format: LoadFormat = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Requests in progress (B).")] = 64,
    context: Annotated[int, typer.Option(min=8, help="Prompt tokens of each request (S).")] = 8192,
    sweep: Annotated[str | None, typer.Option(help="Several settings instead, such as 64x8K,32x16K.")] = None,
    paper_table: Annotated[
        bool, typer.Option("--paper-table", help="The eight settings of the paper's Tables 6 and 7.")
    ] = False,
    new_tokens: Annotated[int, typer.Option(min=8, help="Tokens to generate, EOS off.")] = 256,
    settle_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that each request emits before the clock starts.")
    ] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements per setting and engine.")] = 3,
    imposed_acceptance: ImposedAcceptance = None,
    text: Text = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1.0)] = 1.0,
    backend: Backend = None,
    dtype: Dtype = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Trace each setting too: kernel times by kind, GPU idle time.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for report.json, report.md, report.png.")] = None,
) -> None:
    """Measure decode throughput with S3R and without, in one go and otherwise alike.

    The settings come from --batch-size and --context, or --sweep, or --paper-table.
    Further arguments (`--s3r-budget-ratio 0.1`, `--mem-fraction-static 0.8`, …) go to SGLang.
    Those for speculation go to the S3R engine only.
    """
    from s3r_sglang import cli

    if paper_table:
        _refuse_beside(ctx, "--paper-table", "sweep", "batch_size", "context")
    if sweep is not None:
        _refuse_beside(ctx, "--sweep", "batch_size", "context")
    cli.quiet()
    from s3r_sglang.bench import execute

    options = execute.Options(
        model=model,
        load_format=load_format,
        settings=f"{batch_size}x{context}" if sweep is None else sweep,
        paper_table=paper_table,
        new_tokens=new_tokens,
        settle_tokens=settle_tokens,
        repeats=repeats,
        imposed_acceptance=imposed_acceptance,
        text=text,
        sampling={"temperature": temperature, "top_p": top_p},
        dtype=dtype,
        out=out,
        profile=profile,
    )
    _execute(execute, options, ctx, backend)


def _refuse_beside(ctx: typer.Context, option: str, *others: str) -> None:
    """Raise BadParameter if the command line has one of `others`, which `option` would override."""
    for name in others:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"{option} has settings of its own: leave out --{name.replace('_', '-')}"
            )


def bench_kv(
    ctx: typer.Context,
    model: Model,
    load_format: LoadFormat = "auto",
    variants: Annotated[
        str,
        typer.Option(help="Which rows to run now (ar,aimd,…); a wrong name lists them."),
    ] = "all",
    requests: Annotated[int, typer.Option(min=1, help="Responses in all, sent at once.")] = 512,
    group_size: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 8,
    slots: Annotated[
        int, typer.Option(min=1, help="Most requests in progress; low and mid get 1/2, 5/8.")
    ] = 256,
    prompt_length: Annotated[int, typer.Option(min=8, help="Tokens of a prompt.")] = 128,
    max_length: Annotated[
        int, typer.Option(min=8, help="Longest response; the KV pool shrinks with it, and so does the time.")
    ] = 16384,
    median_length: Annotated[
        int | None, typer.Option(min=1, help="Median response in tokens. [default: 0.2 of --max-length]")
    ] = None,
    pressure: Annotated[
        float, typer.Option(min=0.1, help="Peak demand for KV over the size of the KV pool.")
    ] = 1.5,
    imposed_acceptance: ImposedAcceptance = None,
    text: Text = None,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and lengths.")] = 0,
    backend: Backend = None,
    dtype: Dtype = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.json, report.md, report.png; rows it has are not run again."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Run rows again that --out has.")] = False,
) -> None:
    """Roll out more than the KV pool holds, with every way of scheduling KV (the paper's Table 2).

    One engine after the other, same pool, prompts and lengths.
    Further arguments go to SGLang, those for speculation to the S3R engines only.
    """
    from s3r_sglang import cli

    cli.quiet()
    from s3r_sglang.bench.kv import execute

    options = execute.Options(
        model=model,
        load_format=load_format,
        variants=variants,
        requests=requests,
        group_size=group_size,
        slots=slots,
        prompt_length=prompt_length,
        max_length=max_length,
        median_length=median_length,
        pressure=pressure,
        imposed_acceptance=imposed_acceptance,
        text=text,
        seed=seed,
        dtype=dtype,
        out=out,
        force=force,
    )
    _execute(execute, options, ctx, backend)


def _execute(module: Any, options: Any, ctx: typer.Context, backend: str | None) -> None:
    """Run the benchmark of `module` with the options for it and the arguments for SGLang."""
    from s3r_sglang import cli

    backend_argv = ["--attention-backend", backend] if backend else []
    try:
        module.execute(options, [*ctx.args, *backend_argv], cli.console)
    except module.FAULTS as error:
        raise cli.fail(str(error)) from None
