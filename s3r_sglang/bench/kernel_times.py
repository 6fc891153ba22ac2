"""GPU time by kind of kernel, from a trace of SGLang's profiler: the attention time of the paper's Table 6.

The stage times of the probe say what a round costs; this says what it is spent on, how long the GPU idles within
it, and how often the host waits for the GPU: once, under overlap scheduling, for the tokens of the step before. A
traced run is slower than a timed one, so no throughput comes from here.
"""

import asyncio
import gzip
import json
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from s3r_sglang.bench.load import LoadError

# First match wins. Names of FlashAttention 3, FlashInfer, SGLang's Triton kernels, cuBLAS and ours.
KINDS = {
    "sampling": r"_race_kernel|_winner_kernel|_row_stats_kernel|_target_probs_kernel|softmax_warp|cunn_SoftMax"
    r"|TopK|TopP|argmax",
    "index refresh": r"_scores_kernel|_lse_kernel|_select_kernel|_group_maxima|_make_shortlist",
    # FlashInfer's norms are no attention: they run twice a layer, and would upset the count of steps.
    "attention": r"flash::|FlashAttn|flash_fwd|fmha|attention|attn|prepare_varlen|_sparse_decode_kernel"
    r"|_verify_kernel|_combine_kernel|BatchDecode|BatchPrefill|_fwd_kernel",
    "projections": r"gemm|nvjet|cutlass|cublas|splitK|xmma",
    "communication": r"nccl|all_reduce|allreduce|all_gather",
}
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# Calls that return when the GPU has got there. A copy to memory that is not pinned is one too.
_WAIT_CALLS = r"^cu(da)?(Device|Ctx|Stream|Event)Synchronize|^cuda(Memcpy|Memset)$"
_WAIT_COPIES = r"DtoH.*Pageable"
TRACE_TIMEOUT_S = 120.0


class KernelTimes(BaseModel):
    """What a step (autoregressive) or a round (S3R) consists of.

    Attributes:
        steps: traced steps or rounds.
        kind_ms: time per step by kind of kernel; the kinds of `KINDS`, and "other".
        idle_share: share of the traced time in which no kernel, copy or fill ran.
        longest: the kernels that took longest, with ms per step.
        host_waits: how often in a step the host waits for the GPU, by what it calls; None in older reports.
    """

    model_config = ConfigDict(frozen=True)

    steps: float
    kind_ms: dict[str, float]
    idle_share: float
    longest: dict[str, float]
    host_waits: dict[str, float] | None = None

    @property
    def attention_ms(self) -> float:
        """Attention per step or round, without the refresh of the index."""
        return self.kind_ms.get("attention", 0.0)


def kind_of(kernel: str) -> str:
    """The key of `KINDS` that a kernel name belongs to, or "other"."""
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel)), "other")


def summarize(events: Iterable[dict[str, Any]], launches_per_step: int) -> KernelTimes:
    """Aggregate the GPU events of a Chrome trace.

    Args:
        events: `traceEvents` of all threads; times in microseconds.
        launches_per_step: how often the most frequent attention kernel runs in a step or round: the number
            of layers, times k if it drafts.

    Raises:
        ValueError: there is no attention kernel among the events.
    """
    events = list(events)
    work = [event for event in events if event.get("cat") in _WORK]
    kernels = [event for event in work if event["cat"] == "kernel"]
    launches = Counter(event["name"] for event in kernels if kind_of(event["name"]) == "attention")
    if not launches:
        raise ValueError("the trace holds no attention kernel")
    steps = max(launches.values()) / launches_per_step
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    for event in kernels:
        by_kind[kind_of(event["name"])] += event["dur"] / 1e3 / steps
        by_name[event["name"]] += event["dur"] / 1e3 / steps
    longest = sorted(by_name, key=lambda name: -by_name[name])[:12]
    return KernelTimes(
        steps=steps,
        kind_ms=dict(by_kind),
        idle_share=_idle_share(work),
        longest={name[:120]: by_name[name] for name in longest},
        host_waits={name: count / steps for name, count in _host_waits(events).items()},
    )


def _host_waits(events: Iterable[dict[str, Any]]) -> Counter[str]:
    """How often the host waited for the GPU, by the name of the call or copy."""
    patterns = {"cuda_runtime": _WAIT_CALLS, "cuda_driver": _WAIT_CALLS, "gpu_memcpy": _WAIT_COPIES}
    return Counter(
        event["name"]
        for event in events
        if event.get("cat") in patterns and re.search(patterns[event["cat"]], event["name"])
    )


def _idle_share(work: Sequence[dict[str, Any]]) -> float:
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in work)
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - spans[0][0])


def trace(
    engine: Any, prompts: Sequence[list[int]], params: dict[str, Any], num_steps: int, settle_tokens: int
) -> list[dict[str, Any]]:
    """Decode `prompts`, and trace the GPU for `num_steps` steps or rounds once all requests are under way.

    Args:
        engine: a running `sgl.Engine` on a GPU.
        prompts: [B][S] token ids, whose KV should be in the radix cache: a long prefill lets the first
            requests finish before the last one starts.
        params: sampling parameters; `max_new_tokens` must reach beyond the traced steps.
        num_steps: decode steps or rounds.
        settle_tokens: tokens that every request emits before.

    Returns:
        The trace's events, of rank 0.

    Raises:
        LoadError: a request would finish before the trace ends: it would show a smaller batch.
        TimeoutError: SGLang wrote no trace.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine.loop.run_until_complete(_decode(engine, prompts, params, num_steps, settle_tokens, folder))
        deadline = time.monotonic() + TRACE_TIMEOUT_S
        while time.monotonic() < deadline:
            for file in Path(folder).glob("*-TP-0*.trace.json.gz"):
                try:
                    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
                except (EOFError, ValueError):
                    pass  # still being written
            time.sleep(0.5)
    raise TimeoutError(f"SGLang wrote no trace within {TRACE_TIMEOUT_S:.0f} s")


async def _decode(engine, prompts, params, num_steps, settle_tokens, folder) -> None:
    from sglang.srt.managers.io_struct import ProfileReq

    settled = asyncio.Semaphore(0)
    emitted = [0] * len(prompts)
    tokens_per_step = 1 + (engine.server_args.speculative_num_steps or 0)

    async def one(i: int) -> None:
        stream = await engine.async_generate(input_ids=prompts[i], sampling_params=params, stream=True)
        async for chunk in stream:
            before, emitted[i] = emitted[i], chunk["meta_info"]["completion_tokens"]
            if before < settle_tokens <= emitted[i]:
                settled.release()

    async def profile() -> bool:
        for _ in prompts:
            await settled.acquire()
        if max(emitted) + num_steps * tokens_per_step > params["max_new_tokens"]:
            return False
        await engine.tokenizer_manager.start_profile(
            ProfileReq(
                output_dir=folder,
                num_steps=num_steps,
                activities=["GPU"],
                with_stack=False,
                record_shapes=False,
            )
        )
        return True

    full, *_ = await asyncio.gather(profile(), *map(one, range(len(prompts))))
    if not full:
        raise LoadError(
            f"a request would finish before {num_steps} steps of the full batch are traced: raise --new-tokens"
        )
