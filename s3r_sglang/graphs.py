"""CUDA graphs of the draft stage: the k steps, with their sampling, in one graph for each batch bucket.

SGLang's own decode runner captures the verify forward, because the dense backend is the model runner's.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from s3r_sglang.draft import Drafter
from s3r_sglang.sampling import SamplingParams
from s3r_sglang.sglang_symbols import (
    get_or_create_global_graph_memory_pool,
    graph_capture,
    model_capture_mode,
)
from s3r_sglang.types import Block, Draft

logger = logging.getLogger(__name__)


class GraphedDrafter:
    """A drafter that replays graphs where it can, and runs eagerly where it cannot.

    Eager are batches larger than the largest bucket, and those that bias logits. Batches that filter have graphs
    of their own, in fewer sizes, since few servers see such batches and each takes start-up time. A padded row
    drafts for slot 0 from an empty prefix: SGLang keeps that slot and the KV row behind it for padding.

    Memory: the proposal buffer of the largest bucket, 4 bytes x bucket x k x V (0.93 GB for 256 requests,
    k = 6, V = 152K), and the graphs, which share SGLang's graph memory pool.

    Args:
        drafter: the eager one.
        lay_out: the worker's function from request slots, starts, bonus tokens and seeds to a `Block`.
        buckets: batch sizes to capture.
    """

    def __init__(
        self, drafter: Drafter, lay_out: Callable[..., Block], buckets: list[int], device: torch.device | str
    ) -> None:
        self.drafter = drafter
        self.lay_out = lay_out
        # By whether the batch filters.
        self.buckets = {False: sorted(buckets), True: halvings(buckets)}
        largest = max(buckets)
        self.inputs = {
            name: torch.zeros(largest, dtype=torch.int64, device=device)
            for name in ("req_pool_indices", "start", "bonus_tokens", "seeds")
        }
        self.params = SamplingParams(
            temperatures=torch.ones(largest, dtype=torch.float32, device=device),
            top_ks=torch.ones(largest, dtype=torch.int32, device=device),
            top_ps=torch.ones(largest, dtype=torch.float32, device=device),
            min_ps=torch.zeros(largest, dtype=torch.float32, device=device),
            need_top_k=False,
            need_top_p=False,
            need_min_p=False,
        )
        self.out = drafter.new_draft(largest)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}  # by bucket and whether it filters

    def capture(self) -> None:
        """Capture all buckets, the largest first: the later ones reuse its memory."""
        # SGLang's `graph_capture` makes the all-reduces of tensor parallelism recordable, and gives the stream.
        with model_capture_mode(), graph_capture() as context:
            for filtered, buckets in self.buckets.items():
                for bucket in reversed(buckets):
                    self._capture_bucket(bucket, filtered, context.stream)
        logger.info(
            "S3R: captured draft graphs for batch sizes %s, filtered ones for %s", *self.buckets.values()
        )

    def _capture_bucket(self, bucket: int, filtered: bool, stream: torch.cuda.Stream) -> None:
        def run() -> None:
            block = self.lay_out(**{name: buffer[:bucket] for name, buffer in self.inputs.items()})
            self.drafter.run(block, self._params(bucket, filtered), self._out(bucket))

        run()  # compiles the kernels and fills the caches that a capture must not touch
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=get_or_create_global_graph_memory_pool(torch.cuda), stream=stream):
            run()
        self._graphs[bucket, filtered] = graph

    def __call__(self, block: Block, params: SamplingParams) -> Draft:
        """Draft k tokens for each request, see `Drafter.__call__`; the result is overwritten by the next call."""
        batch_size = block.start.shape[0]
        buckets = self.buckets[params.filtered]
        if batch_size > buckets[-1]:
            return self.drafter(block, params)
        if params.logit_bias is not None:
            return self.drafter.run(block, params, self._out(batch_size))
        bucket = buckets[bisect.bisect_left(buckets, batch_size)]
        for name, buffer in self.inputs.items():
            buffer[:batch_size].copy_(getattr(block, name))
            buffer[batch_size:bucket].zero_()
        self.params.temperatures[:batch_size].copy_(params.temperatures.view(-1))
        self.params.top_ks[:batch_size].copy_(params.top_ks)
        if params.filtered:
            self.params.top_ps[:batch_size].copy_(params.top_ps)
            self.params.min_ps[:batch_size].copy_(params.min_ps)
        self._graphs[bucket, params.filtered].replay()
        return self._out(batch_size)

    def _params(self, batch_size: int, filtered: bool) -> SamplingParams:
        return replace(
            self.params,
            need_top_p=filtered,
            temperatures=self.params.temperatures[:batch_size],
            top_ks=self.params.top_ks[:batch_size],
            top_ps=self.params.top_ps[:batch_size],
            min_ps=self.params.min_ps[:batch_size],
        )

    def _out(self, batch_size: int) -> Draft:
        return Draft(tokens=self.out.tokens[:batch_size], probs=self.out.probs[:batch_size])


def halvings(buckets: list[int]) -> list[int]:
    """The largest bucket, the largest that is at most half of it, and so on; ascending."""
    kept: list[int] = []
    for bucket in sorted(buckets, reverse=True):
        if not kept or 2 * bucket <= kept[-1]:
            kept.append(bucket)
    return kept[::-1]
