"""The S3R worker: one round, from the committed prefix of each request to its next tokens.

SGLang's scheduler calls `S3RWorker.forward_batch_generation` with a prefill batch or a decode batch. A decode
batch runs one round: draft → verify → sample; the verify forward refreshes the sparse index on its way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from s3r_sglang.attention import DenseAttention, SparseAttention
from s3r_sglang.config import config_of
from s3r_sglang.draft import Drafter
from s3r_sglang.graphs import GraphedDrafter
from s3r_sglang.logprobs import output_logprobs, sparse_logprobs
from s3r_sglang.metrics import RoundMetrics
from s3r_sglang.plugin import assert_installed
from s3r_sglang.sampling import SamplingParams, keep_drafts, sample_target, verify_sample
from s3r_sglang.seeds import RequestSeeds
from s3r_sglang.sglang_symbols import (
    BaseSpecWorker,
    ForwardMode,
    GenerationBatchResult,
    ParallelState,
    ScheduleBatch,
    ServerArgs,
    TpModelWorker,
)
from s3r_sglang.state import RoundState
from s3r_sglang.support import refuse_unsupported_layers
from s3r_sglang.types import Block, S3RDraftInput
from s3r_sglang.verify import verify

logger = logging.getLogger(__name__)


class S3RWorker(BaseSpecWorker):
    """Self-sparse speculative decoding with one model runner: it drafts sparsely and verifies densely."""

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Callable[[torch.Tensor], None] | None = None
    ) -> GenerationBatchResult:
        """Run a prefill batch or one round of a decode batch.

        Args:
            batch: SGLang's; `batch.seq_lens` is L of each request in a decode batch.
            on_publish: SGLang's relay of the new lengths, called as soon as they are known on the device.
        """
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish)
        with nullcontext() if self.probe is None else self.probe.round(batch.seq_lens):
            return self._round(batch, on_publish)

    def _round(self, batch: ScheduleBatch, on_publish) -> GenerationBatchResult:
        params = sampling_params(batch)
        block = self._lay_out(
            batch.req_pool_indices,
            batch.seq_lens,
            batch.spec_info.bonus_tokens.long(),
            self.seeds.of(batch.req_pool_indices),
        )
        with self._timed("draft"):
            draft = self.drafter(block, params)
        with self._timed("verify"):
            result = verify(self.target_worker, batch, block, draft)
        with self._timed("sample"):
            if self.config.faithful:
                logits = result.logits_output.next_token_logits
                tokens, accept_lens = verify_sample(
                    logits, draft.tokens, draft.probs, params, block.seeds, block.start
                )
            else:
                tokens, accept_lens = keep_drafts(draft.tokens)
        if self.probe is not None:
            tokens, accept_lens = self.probe.impose(
                tokens, accept_lens, draft.tokens, block.seeds, block.start
            )
        new_seq_lens = block.start + accept_lens
        if on_publish is not None:
            on_publish(new_seq_lens)
        if batch.return_logprob and self.config.faithful:
            output_logprobs(batch, result.logits_output, tokens, params)
        elif batch.return_logprob:
            sparse_logprobs(batch, result.logits_output, tokens, draft.probs)
        bonus = tokens.gather(1, (accept_lens - 1).long()[:, None]).squeeze(1)
        batch.forward_mode = ForwardMode.DECODE
        return self._finish(result, tokens.flatten(), accept_lens, new_seq_lens, bonus)

    def _prefill(self, batch: ScheduleBatch, on_publish) -> GenerationBatchResult:
        self.seeds.admit(batch.reqs, batch.req_pool_indices)
        # "is_verify" asks for logits only: the first token is sampled here, with the request's own seed.
        result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        params = sampling_params(batch)
        logits = result.logits_output.next_token_logits
        tokens = sample_target(logits, params, self.seeds.of(batch.req_pool_indices), batch.seq_lens)
        new_seq_lens = batch.seq_lens.clone()
        if on_publish is not None:
            on_publish(new_seq_lens)
        if batch.return_logprob:
            output_logprobs(batch, result.logits_output, tokens, params)
        accept_lens = torch.ones_like(tokens, dtype=torch.int32)
        return self._finish(result, tokens, accept_lens, new_seq_lens, tokens)

    def _lay_out(
        self,
        req_pool_indices: torch.Tensor,
        start: torch.Tensor,
        bonus_tokens: torch.Tensor,
        seeds: torch.Tensor,
    ) -> Block:
        """Lay out positions L … L + k; SGLang has allocated their KV rows in the request table."""
        positions = start[:, None] + self.block_offsets
        return Block(
            req_pool_indices=req_pool_indices,
            start=start,
            positions=positions,
            cache_locs=self.req_to_token_pool.req_to_token[req_pool_indices[:, None], positions].long(),
            bonus_tokens=bonus_tokens,
            seeds=seeds,
        )

    def _finish(self, result, tokens, accept_lens, new_seq_lens, bonus) -> GenerationBatchResult:
        result.next_token_ids = tokens
        result.accept_lens = accept_lens
        result.new_seq_lens = new_seq_lens
        result.next_draft_input = S3RDraftInput(bonus_tokens=bonus, new_seq_lens=new_seq_lens)
        result.speculative_num_draft_tokens = self.block_size
        return result

    def _timed(self, stage: str) -> AbstractContextManager[None]:
        return nullcontext() if self.probe is None else self.probe.stage(stage)

    # ---- life cycle, in the order in which SGLang calls it

    def __init__(
        self,
        server_args: ServerArgs,
        gpu_id: int,
        ps: ParallelState,
        nccl_port: int,
        target_worker: TpModelWorker,
    ) -> None:
        super().__init__()
        assert_installed()
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.device = self.model_runner.device
        self.config = config_of(server_args)
        self.block_size = self.config.draft_length + 1
        self.block_offsets = torch.arange(self.block_size, device=self.device)
        self.metrics = RoundMetrics(self.config, enabled=ps.tp_rank == 0)
        self.probe = bench_probe(ps.tp_rank)
        # Before the pools: SGLang gives the KV cache what is then left of the GPU's memory.
        self.state = RoundState.allocate(self.config, self.model_runner)
        base_seed = target_worker.random_seed if self.config.seed is None else self.config.seed
        self.seeds = RequestSeeds(
            base_seed, self.state.num_slots, self.device, replica=ps.dp_rank or 0, num_replicas=ps.dp_size
        )
        logger.info("S3R: %s; %.2f GB of state on the device", self.config, self.state.nbytes / 1e9)

    def alloc_memory_pool(
        self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.state.check_fits(req_to_token_pool.req_to_token)

    def init_attention_backends(self) -> None:
        refuse_unsupported_layers(self.model_runner.model)
        base = dense_base(self.model_runner)
        self.dense_attention = DenseAttention(base, self.state)
        self.model_runner.attn_backend = self.dense_attention
        self.drafter = Drafter(self.model_runner, SparseAttention(base, self.state), self.config.draft_length)

    def init_cuda_graphs(self) -> None:
        """Capture the draft; SGLang has captured the verify forward as the target's decode graphs."""
        if self.model_runner.decode_cuda_graph_runner is None:
            return
        buckets = self.model_runner.decode_cuda_graph_runner.capture_bs
        self.drafter = GraphedDrafter(self.drafter, self._lay_out, buckets, self.device)
        self.drafter.capture()

    def clear_cache_pool(self) -> None:
        self.state.index.clear()

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        self.metrics.record(num_correct_drafts_per_req)

    @property
    def draft_worker(self) -> None:
        """The policy drafts for itself: there is no second model whose weights or KV could be out of step."""
        return None

    def update_weights_from_disk(self, recv_req):
        if recv_req.recapture_cuda_graph and isinstance(self.drafter, GraphedDrafter):
            self.drafter.capture()  # as SGLang has just done with its own
        return True, "The drafter shares the target's weights."

    def update_weights_from_ipc(self, recv_req):
        return True, "The drafter shares the target's weights."

    def update_weights_from_tensor(self, recv_req):
        return self.target_worker.update_weights_from_tensor(recv_req)


def sampling_params(batch: ScheduleBatch) -> SamplingParams:
    """Parameters of the batch; the requests are only walked if one of them has a top-k (greedy counts)."""
    info = batch.sampling_info
    top_ks = [req.sampling_params.top_k for req in batch.reqs] if info.need_top_k_sampling else None
    return SamplingParams.from_sampling_info(info, top_ks)


def bench_probe(tp_rank: int):
    """The probe of `s3r bench` if its environment variable is set; nothing of it is imported otherwise."""
    if "S3R_BENCH_PROBE" not in os.environ:
        return None
    from s3r_sglang.bench.probe import Probe

    return Probe.from_environment(tp_rank=tp_rank)


def dense_base(model_runner):
    """The backend that attends densely: SGLang's choice on a GPU, plain PyTorch on a CPU."""
    if model_runner.device == "cpu":
        from s3r_sglang.cpu.attention import CPUAttention

        return CPUAttention(model_runner)
    return model_runner.attn_backend
