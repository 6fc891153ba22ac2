"""Run one variant: an engine with the pool of the job, one rollout, and the checks that it was answered right."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from s3r_sglang.bench import check, load, provenance
from s3r_sglang.bench.kv.records import VARIANTS, KvJob, KvRun, KvSample, KvTotals, Variant
from s3r_sglang.bench.kv.workload import Workload, median_length
from s3r_sglang.bench.load import LoadError
from s3r_sglang.bench.probe import ProbeConfig, planned_rid
from s3r_sglang.bench.run import probed_engine
from s3r_sglang.config import config_of

SAMPLE_SECONDS = 0.2
# A scheduler whose state and totals stay the same for so long will not answer any more.
STALL_SECONDS = 60.0
WARM_UP_TOKENS = 24
# Most tokens that SGLang's admission sets aside for a request, and the longest response of the paper's ablation.
CLIP_ENV, FULL_CLIP = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", 4096
FULL_MEDIAN = median_length(16384, None)
# Logprobs are checked for this many responses; all of them would cost a second rollout's prefill.
CHECKED = 32
MOVED = ("pauses", "repauses", "pages_out", "pages_in", "recomputed", "restores", "restore_seconds")
TOTALS = (*MOVED, "rounds", "prefills")
STATE = ("limit", "active", "paused", "waiting", "utilization", "rounds", "prefills", "pauses")

Progress = Callable[[str], None]


class AnswerError(RuntimeError):
    """A request was lost, answered twice, or answered with another number of tokens than it should."""


@dataclass
class Rollout:
    """What the engine gave: one output per request, in the order of the requests."""

    outputs: list[dict[str, Any]]
    seconds: float
    samples: list[KvSample] = field(default_factory=list)


def run_variant(job: KvJob, key: str, folder: Path, workload: Workload, progress: Progress) -> KvRun:
    """Measure one row of the table.

    Args:
        job: what all rows share.
        key: in VARIANTS.
        folder: of the model.
        workload: that of `job`.
        progress: told what is being done.

    Raises:
        LoadError: the pool does not fit into the device's memory.
        AnswerError: a response is missing or wrong; its time does not count.
    """
    variant = VARIANTS[key]
    title = variant.title(job.slots)
    progress(f"{title}: starting the engine")
    argv = _engine_argv(job, key, folder, workload)
    probe = ProbeConfig(imposed_acceptance=job.imposed_acceptance, planned_ends=True)
    admission = scaled_admission(median_length(job.longest, job.median))
    with admission, probed_engine(argv, variant.policy is not None, probe) as engine:
        _check_pool(job, engine)
        progress(f"{title}: warm-up")
        _warm_up(engine, workload, job.slots)
        before = kv_state(engine.loop.run_until_complete(_internal_state(engine)))
        progress(f"{title}: {job.requests} responses, {job.tokens} tokens")
        checked = _checked(job)
        rollout = engine.loop.run_until_complete(_roll_out(engine, workload, checked))
        after = kv_state(engine.loop.run_until_complete(_settled_state(engine)))
        check_answers(workload, rollout.outputs)
        error = None
        if checked:
            progress(f"{title}: scoring {len(checked)} responses")
            error = _logprob_error(engine, workload, rollout.outputs, checked)
        config = config_of(engine.server_args).model_dump() if variant.policy else {}
    traces = [load.Trace(meta=output["meta_info"]) for output in rollout.outputs]
    return KvRun(
        variant=key,
        title=title,
        created=provenance.now(),
        git_commit=provenance.git_commit(),
        seconds=rollout.seconds,
        requests=job.requests,
        tokens=job.tokens,
        retractions=sum(trace.meta["num_retractions"] for trace in traces),
        accept_histogram=tuple(load.accept_histogram(traces)) if variant.policy else (),
        checked=len(checked),
        logprob_error=error,
        kv=_totals(before, after),
        samples=tuple(rollout.samples),
        s3r_config=config,
    )


@contextmanager
def scaled_admission(median: float) -> Iterator[None]:
    """Have engines that start within expect as much of a response, relative to the median, as at full scale.

    SGLang's own admission (AR and recompute) sets a share of at most 4,096 tokens aside per request. Left at that,
    it would hardly admit anything beside responses of up to 4K tokens, and never be under pressure.
    """
    if CLIP_ENV in os.environ:
        yield
        return
    os.environ[CLIP_ENV] = str(max(1, int(FULL_CLIP * min(1, median / FULL_MEDIAN))))
    try:
        yield
    finally:
        del os.environ[CLIP_ENV]


def policy_argv(variant: Variant, slots: int) -> list[str]:
    """What makes an engine this row of the table."""
    argv = ["--s3r-kv-policy", variant.policy] if variant.policy else []
    if variant.share < 1:
        argv += ["--s3r-kv-limit", str(variant.limit(slots))]
    if not variant.headroom:
        argv += ["--s3r-kv-headroom", "0"]
    return argv


def _engine_argv(job: KvJob, key: str, folder: Path, workload: Workload) -> list[str]:
    slots = str(job.slots)
    # fmt: off
    return [
        "--model-path", str(folder), "--load-format", job.load_format, "--skip-tokenizer-init",
        "--log-level", "error", "--max-running-requests", slots, "--cuda-graph-max-bs-decode", slots,
        "--max-total-tokens", str(job.pool_tokens), "--context-length", str(workload.context),
        *(["--dtype", job.dtype] if job.dtype else []),
        *policy_argv(VARIANTS[key], job.slots), *job.engine_argv,
    ]
    # fmt: on


def _check_pool(job: KvJob, engine: Any) -> None:
    capacity = engine.get_server_info()["max_total_num_tokens"]
    if capacity < job.pool_tokens:
        needed = job.pool_tokens * job.kv_bytes_per_token / 1e9
        raise LoadError(
            f"the job wants a KV pool of {job.pool_tokens} tokens ({needed:.1f} GB), the engine has room for "
            f"{capacity}: raise --mem-fraction-static, or lower --max-length or --slots"
        )


def _warm_up(engine: Any, workload: Workload, slots: int) -> None:
    """Compile what is left to compile, at full slots; then forget the prompts."""
    prompts = workload.prompts[:slots]
    short = Workload(prompts, lengths=[WARM_UP_TOKENS] * len(prompts), longest=WARM_UP_TOKENS)
    # Twice: the second time with a warm radix cache, as most responses of a group have it.
    for _ in range(2):
        engine.loop.run_until_complete(_roll_out(engine, short, set()))
    engine.flush_cache()


def _checked(job: KvJob) -> set[int]:
    """Requests whose logprobs are checked; evenly spread, so that some of them are paused."""
    if job.load_format == "dummy":
        return set()
    return set(range(0, job.requests, max(1, job.requests // CHECKED)))


async def _roll_out(engine: Any, workload: Workload, checked: set[int]) -> Rollout:
    params = {"temperature": 1.0, "max_new_tokens": workload.longest, "ignore_eos": True}
    done = asyncio.Event()

    async def one(index: int) -> dict[str, Any]:
        return await engine.async_generate(
            input_ids=workload.prompts[index],
            sampling_params=params,
            rid=planned_rid(index, workload.lengths[index]),
            return_logprob=index in checked,
        )

    begin = time.perf_counter()
    watcher = asyncio.create_task(_watch(engine, done, begin))
    answers = asyncio.gather(*map(one, range(len(workload.prompts))))
    await asyncio.wait({watcher, answers}, return_when=asyncio.FIRST_COMPLETED)
    if watcher.done() and watcher.exception() is not None:
        answers.cancel()
        raise watcher.exception()
    try:
        outputs = await answers
        seconds = time.perf_counter() - begin
    finally:
        done.set()
    return Rollout(outputs, seconds, await watcher)


async def _watch(engine: Any, done: asyncio.Event, begin: float) -> list[KvSample]:
    """The scheduler's state every SAMPLE_SECONDS; host memory only, so no round waits for it.

    Raises:
        AnswerError: nothing has changed for STALL_SECONDS.
    """
    samples: list[KvSample] = []
    # The scheduler process stamps its state by the wall clock.
    started = time.time() - (time.perf_counter() - begin)
    changed, last = begin, None
    while not done.is_set():
        state = kv_state(await _internal_state(engine))
        if state is None:
            return []
        if state | {"seconds": 0} != last:
            changed, last = time.perf_counter(), state | {"seconds": 0}
        elif time.perf_counter() - changed > STALL_SECONDS:
            raise AnswerError(f"the scheduler has stood still for {STALL_SECONDS:.0f} s: {state}")
        moment = state["seconds"] - started
        samples.append(KvSample(seconds=moment, **{name: state[name] for name in STATE}))
        try:
            await asyncio.wait_for(done.wait(), SAMPLE_SECONDS)
        except TimeoutError:
            continue
    return samples


async def _internal_state(engine: Any) -> dict[str, Any]:
    states = await engine.tokenizer_manager.get_internal_state()
    if len(states) != 1:
        raise LoadError("s3r bench-kv measures one replica: leave --dp-size at 1")
    return states[0]


async def _settled_state(engine: Any) -> dict[str, Any]:
    """The state once nothing is active or in host memory any more.

    Raises:
        AnswerError: something is left for seconds, though every request was answered.
    """
    for _ in range(25):
        internal = await _internal_state(engine)
        state = kv_state(internal) or {}
        left = {name: state.get(name, 0) for name in ("active", "paused", "waiting", "host_pages_used")}
        if not any(left.values()):
            return internal
        await asyncio.sleep(SAMPLE_SECONDS)
    raise AnswerError(f"all requests are answered, but the scheduler still holds {left}")


def kv_state(internal_state: dict[str, Any]) -> dict[str, Any] | None:
    """KVStats of a replica by field name; None for an engine without S3R."""
    return internal_state.get("s3r", {}).get("kv")


def _totals(before: dict[str, Any] | None, after: dict[str, Any] | None) -> KvTotals | None:
    if before is None or after is None:
        return None
    totals = {name: after[name] - before[name] for name in TOTALS}
    return KvTotals(
        **totals,
        # The scheduler's own peak knows no rollouts, so it may be that of the warm-up.
        host_pages_peak=after["host_pages_peak"] if totals["pages_out"] else 0,
        host_pages_capacity=after["host_pages_capacity"],
    )


def check_answers(workload: Workload, outputs: Sequence[dict[str, Any]]) -> None:
    """Each request is answered once, at its planned length.

    Raises:
        AnswerError: with the first fault and their number.
    """
    faults = []
    rids = [output["meta_info"]["id"] for output in outputs]
    wanted = [planned_rid(*pair) for pair in enumerate(workload.lengths)]
    if rids != wanted:
        faults.append("the answers do not belong to the requests one by one")
    for rid, length, output in zip(wanted, workload.lengths, outputs, strict=True):
        reason, count = output["meta_info"]["finish_reason"], len(output["output_ids"])
        if (
            reason["type"] != "length"
            or count != length
            or output["meta_info"]["completion_tokens"] != length
        ):
            faults.append(f"{rid} ended with {count} tokens by {reason}")
    if faults:
        raise AnswerError(f"{len(faults)} of {len(wanted)} requests are not answered right: {faults[0]}")


def _logprob_error(
    engine: Any, workload: Workload, outputs: Sequence[dict[str, Any]], checked: set[int]
) -> float:
    """Against a prefill by the same engine, which is dense in all of them."""
    responses = [check.Response.of(workload.prompts[i], outputs[i]) for i in sorted(checked)]
    # One at a time: all at once would need a pool of their size.
    errors = [check.logprob_error(engine, [response]) for response in responses]
    weights = [len(response.tokens) for response in responses]
    return sum(error * n for error, n in zip(errors, weights, strict=True)) / sum(weights)
