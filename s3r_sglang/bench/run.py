"""Run one job of `s3r bench`: an engine with S3R, then one without, otherwise the same."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3r_sglang import cpu, launch
from s3r_sglang.bench import check, kernel_times, load, traffic
from s3r_sglang.bench.load import LoadError, Setting, Window
from s3r_sglang.bench.probe import PROBE_ENV, ProbeConfig
from s3r_sglang.bench.records import (
    Correctness,
    SettingResult,
    StageTimes,
    Throughput,
    Traffic,
    read_stage_times,
)
from s3r_sglang.config import S3RConfig, config_of

CHECK_RESPONSES = 8
# What a request occupies beyond its tokens: SGLang allocates two blocks ahead under speculation.
BLOCKS_AHEAD = 2
# Forwards in a trace: decode steps, or rounds, which hold k + 1 forwards each.
TRACED_STEPS, TRACED_ROUNDS = 24, 6


@dataclass(frozen=True)
class Job:
    """What to measure; see `s3r bench --help` for the meaning of each.

    Attributes:
        engine_argv: arguments of SGLang for both engines; those for speculation reach the S3R engine only.
        profile: whether to trace each setting after its repeats.
        prompts: token ids, as many and as long as the largest setting and the check need. A setting takes
            the heads of the first B: so a sweep finds part of their KV in the radix cache, and spends its
            time on decoding.
    """

    model: Path
    load_format: str
    dtype: str | None
    engine_argv: list[str]
    settings: list[Setting]
    new_tokens: int
    settle_tokens: int
    repeats: int
    sampling: dict[str, Any]
    prompts: list[list[int]]
    imposed_acceptance: tuple[float, ...] | None
    profile: bool = False

    @property
    def check_lengths(self) -> tuple[int, int]:
        """Prompt and response length of the correctness check: long enough for a sparse draft where the
        settings allow, and short enough for acceptance not to be imposed."""
        shortest = min(setting.context for setting in self.settings)
        return min(512, shortest // 2), min(64, shortest // 4)

    def prompts_of(self, setting: Setting) -> list[list[int]]:
        """[B][S] token ids, all different."""
        return [prompt[: setting.context] for prompt in self.prompts[: setting.batch_size]]


@dataclass
class EngineRun:
    """What one engine gave."""

    windows: dict[Setting, list[Window]]
    histograms: dict[Setting, list[int]]
    greedy: list[check.Response]
    server_args: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What both engines gave."""

    settings: list[SettingResult]
    correctness: Correctness
    config: S3RConfig
    shape: traffic.ModelShape
    server_args: dict[str, dict[str, Any]]


Progress = Callable[[str], None]
Kernels = dict[Setting, kernel_times.KernelTimes]


def run(job: Job, progress: Progress) -> Outcome:
    """Measure all settings of `job`.

    Args:
        job: what to measure.
        progress: told what is being done.

    Raises:
        LoadError: a setting does not fit, or no steady window exists.
    """
    shape = traffic.ModelShape.read(job.model, job.dtype)
    kernels: dict[str, Kernels] = {}
    with tempfile.TemporaryDirectory() as scratch:
        stage_times = Path(scratch) / "rounds.jsonl"
        with _engine(job, True, stage_times, progress) as engine:
            config = config_of(engine.server_args)
            s3r = _measure(job, engine, "S3R", load.S3R_STREAM_INTERVAL, progress)
            stages = _stage_times(job, read_stage_times(stage_times))
            if job.profile:
                kernels["s3r"] = _trace(job, engine, "S3R", shape.num_layers, progress)
    with _engine(job, False, None, progress) as engine:
        dense = _measure(job, engine, "autoregressive", load.AR_STREAM_INTERVAL, progress)
        progress("autoregressive: scoring the responses of both engines")
        correctness = check.compare(engine, s3r.greedy, dense.greedy, job.load_format != "dummy")
        if job.profile:
            kernels["autoregressive"] = _trace(job, engine, "autoregressive", shape.num_layers, progress)
    return Outcome(
        settings=[
            _result(
                job,
                setting,
                s3r,
                dense,
                config=config,
                stages=stages[setting],
                traffic=_traffic(job, setting, dense, stages[setting], config, shape),
                kernels={name: found[setting] for name, found in kernels.items()},
            )
            for setting in job.settings
        ],
        correctness=correctness,
        config=config,
        shape=shape,
        server_args={"s3r": s3r.server_args, "autoregressive": dense.server_args},
    )


@contextmanager
def _engine(job: Job, speculative: bool, stage_times: Path | None, progress: Progress) -> Iterator[Any]:
    """An engine with room for the largest batch."""
    largest = str(max(setting.batch_size for setting in job.settings))
    # fmt: off
    argv = [
        "--model-path", str(job.model), "--load-format", job.load_format, "--skip-tokenizer-init",
        "--log-level", "error", "--max-running-requests", largest, "--cuda-graph-max-bs-decode", largest,
        *(["--dtype", job.dtype] if job.dtype else []), *job.engine_argv,
    ]
    # fmt: on
    progress(f"{'S3R' if speculative else 'autoregressive'}: starting the engine")
    config = ProbeConfig(
        stage_times=stage_times,
        imposed_acceptance=job.imposed_acceptance,
        imposed_from=min(setting.context for setting in job.settings),
    )
    with probed_engine(argv, speculative, config) as engine:
        yield engine


@contextmanager
def probed_engine(argv: list[str], speculative: bool, config: ProbeConfig) -> Iterator[Any]:
    """An `sgl.Engine` whose scheduler process does what `config` says, as far as it concerns this engine.

    Args:
        argv: arguments of SGLang; without `speculative`, those for speculation are dropped.
    """
    os.environ[PROBE_ENV] = config.model_dump_json()
    try:
        engine = launch.open_engine(launch.arguments(argv, cpu.has_gpu(), speculative))
    finally:
        os.environ.pop(PROBE_ENV, None)
    try:
        yield engine
    finally:
        engine.shutdown()


def _measure(job: Job, engine: Any, title: str, stream_interval: int, progress: Progress) -> EngineRun:
    capacity = engine.get_server_info()["max_total_num_tokens"]
    _check_capacity(job, engine, capacity)
    prompt_length, response_length = job.check_lengths
    progress(f"{title}: greedy responses")
    found = EngineRun({}, {}, [], _telling_arguments(engine, capacity))
    prompts = job.prompts_of(Setting(CHECK_RESPONSES, prompt_length))
    found.greedy = check.greedy(engine, prompts, response_length)
    for setting in job.settings:
        traces = _time(job, engine, setting, title, stream_interval, progress)
        found.windows[setting] = [load.steady_window(repeat, job.settle_tokens) for repeat in traces]
        found.histograms[setting] = load.accept_histogram([trace for repeat in traces for trace in repeat])
    return found


def _time(
    job: Job, engine: Any, setting: Setting, title: str, stream_interval: int, progress: Progress
) -> list[list[load.Trace]]:
    """Traces of all requests, per repeat."""
    prompts = job.prompts_of(setting)
    # Compiles what is left to compile, and leaves the prompts' KV in the radix cache for the repeats: they
    # differ in decoding only, which is what is timed.
    progress(f"{title} {setting}: prefill and warm-up")
    load.decode(engine, prompts, job.sampling, job.settle_tokens, stream_interval)
    found = []
    for repeat in range(job.repeats):
        progress(f"{title} {setting}: repeat {repeat + 1} of {job.repeats}")
        found.append(load.decode(engine, prompts, job.sampling, job.new_tokens, stream_interval))
    return found


def _trace(job: Job, engine: Any, title: str, num_layers: int, progress: Progress) -> Kernels:
    """Kernel times of every setting; last, as a traced process may launch CUDA graphs more slowly ever after."""
    draft_length = engine.server_args.speculative_num_steps or 0
    steps = TRACED_ROUNDS if draft_length else TRACED_STEPS
    params = {**job.sampling, "max_new_tokens": job.new_tokens, "ignore_eos": True}
    # The draft's kernel runs in every layer of every draft step, more often than any other attention kernel.
    launches = num_layers * max(1, draft_length)
    found = {}
    for setting in job.settings:
        progress(f"{title} {setting}: tracing kernels")
        prompts = job.prompts_of(setting)
        # Later settings may have evicted the prompts' KV: prefilled again here, all requests then start at once.
        load.decode(engine, prompts, job.sampling, job.settle_tokens, load.S3R_STREAM_INTERVAL)
        events = kernel_times.trace(engine, prompts, params, steps, job.settle_tokens)
        found[setting] = kernel_times.summarize(events, launches)
    return found


def _check_capacity(job: Job, engine: Any, capacity: int) -> None:
    draft_length = engine.server_args.speculative_num_steps or 0
    for setting in job.settings:
        per_request = setting.context + job.new_tokens + BLOCKS_AHEAD * (draft_length + 1)
        if setting.batch_size * per_request > capacity:
            raise LoadError(
                f"{setting} needs {setting.batch_size * per_request} tokens of KV, the pool has {capacity}: "
                "lower the batch or the context, or raise --mem-fraction-static or --max-total-tokens"
            )


def _telling_arguments(engine: Any, capacity: int) -> dict[str, Any]:
    names = (
        "attention_backend", "sampling_backend", "dtype", "kv_cache_dtype", "tp_size", "mem_fraction_static",
        "max_running_requests", "chunked_prefill_size", "disable_overlap_schedule", "disable_cuda_graph",
        "speculative_algorithm",
    )  # fmt: skip
    arguments = {name: getattr(engine.server_args, name) for name in names}
    return {**arguments, "max_total_num_tokens": capacity}


def _stage_times(job: Job, rows: list[dict[str, Any]]) -> dict[Setting, StageTimes]:
    """Stage times of the rounds in the timed windows, which leaves the warm-up out."""
    return {
        setting: StageTimes.of(
            rows,
            setting.batch_size,
            first=setting.context + job.settle_tokens,
            last=setting.context + job.new_tokens,
        )
        for setting in job.settings
    }


def _result(
    job: Job, setting: Setting, s3r: EngineRun, dense: EngineRun, config: S3RConfig, **measured: Any
) -> SettingResult:
    return SettingResult(
        batch_size=setting.batch_size,
        context=setting.context,
        new_tokens=job.new_tokens,
        draft_length=config.draft_length,
        autoregressive=Throughput.of(dense.windows[setting]),
        s3r=Throughput.of(s3r.windows[setting]),
        accept_histogram=tuple(s3r.histograms[setting]),
        **measured,
    )


def _traffic(
    job: Job,
    setting: Setting,
    dense: EngineRun,
    stages: StageTimes,
    config: S3RConfig,
    shape: traffic.ModelShape,
) -> dict[str, Traffic]:
    """Predicted bytes of each kind of step in the middle of the window, with its measured time."""
    batch_size, middle = setting.batch_size, setting.context + job.new_tokens / 2
    full = traffic.dense_step(shape, batch_size, middle)
    sparse = traffic.draft_step(shape, config, batch_size, middle)
    step_ms = Throughput.of(dense.windows[setting]).step_ms(batch_size)
    return {
        name: Traffic(weight_bytes=step.weights, kv_bytes=step.kv, milliseconds=milliseconds)
        for name, step, milliseconds in (
            ("autoregressive", full, step_ms),
            ("draft", sparse, stages.draft_ms / config.draft_length),
            ("verify", full, stages.verify_ms),
        )
    }
