"""The draft stage: k decode steps of the policy itself under sparse attention."""

from __future__ import annotations

import torch

from s3r_sglang.attention import SparseAttention
from s3r_sglang.sampling import SamplingParams, draft_sample
from s3r_sglang.sglang_symbols import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardContext,
    ForwardMode,
    ModelRunner,
    forward_context,
)
from s3r_sglang.types import Block, Draft


class Drafter:
    """Runs the k draft steps of a round (arXiv 2610.13202, section 4, "Sparse Drafting").

    Args:
        model_runner: the target model's; drafting has no weights or KV pool of its own.
        attention: the sparse backend.
        draft_length: k.
    """

    def __init__(self, model_runner: ModelRunner, attention: SparseAttention, draft_length: int) -> None:
        self.model_runner = model_runner
        self.attention = attention
        self.draft_length = draft_length

    def __call__(self, block: Block, params: SamplingParams) -> Draft:
        """Draft k tokens for each request; provisional KV is written at positions L … L + k - 1.

        Returns:
            Draft, with `tokens` [B, k] and `probs` [B, k, V].
        """
        return self.run(block, params, self.new_draft(block.start.shape[0]))

    def new_draft(self, batch_size: int) -> Draft:
        """Uninitialised output tensors for `batch_size` requests."""
        shape = (batch_size, self.draft_length)
        vocab_size, device = self.model_runner.model_config.vocab_size, self.model_runner.device
        return Draft(
            tokens=torch.empty(shape, dtype=torch.int64, device=device),
            probs=torch.empty((*shape, vocab_size), dtype=torch.float32, device=device),
        )

    def run(self, block: Block, params: SamplingParams, out: Draft) -> Draft:
        """Draft into `out`. Recordable in a CUDA graph unless logits are biased."""
        fed = block.bonus_tokens
        # By step, laid out at once: copies of columns would be three launches in each step.
        positions, cache_locs = block.positions.t().contiguous(), block.cache_locs.t().contiguous()
        seq_lens = positions + 1
        with forward_context(ForwardContext(attn_backend=self.attention)):
            for step in range(self.draft_length):
                self.attention.step = step
                logits = self._forward(
                    fed, positions[step], cache_locs[step], seq_lens[step], block.req_pool_indices
                )
                fed = draft_sample(logits, params, block.seeds, block.start, step, out.probs[:, step])
                out.tokens[:, step] = fed
        return out

    def _forward(
        self,
        fed: torch.Tensor,
        positions: torch.Tensor,
        cache_locs: torch.Tensor,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ) -> torch.Tensor:
        """One decode step: [B] tokens in, [B, V] logits out."""
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=fed.shape[0],
            input_ids=fed,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            out_cache_loc=cache_locs,
            seq_lens_sum=None,
            positions=positions,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        output = self.model_runner.model.forward(fed, positions, forward_batch)
        return output.next_token_logits
