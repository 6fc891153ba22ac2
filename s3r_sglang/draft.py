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
        self.context = ForwardContext(attn_backend=attention)
        self.draft_length = draft_length

    def __call__(self, block: Block, params: SamplingParams) -> Draft:
        """Draft k tokens for each request; provisional KV is written at positions L … L + k - 1.

        Returns:
            Draft, with `tokens` [B, k] and `probs` [B, k, V].
        """
        batch_size, k = block.start.shape[0], self.draft_length
        vocab_size = self.model_runner.model_config.vocab_size
        device = block.start.device
        tokens = torch.empty((batch_size, k), dtype=torch.int64, device=device)
        probs = torch.empty((batch_size, k, vocab_size), dtype=torch.float32, device=device)
        fed = block.bonus_tokens
        with forward_context(self.context):
            for step in range(k):
                logits = self._forward(fed, block, step)
                fed = draft_sample(logits, params, block.seeds, block.start, step, probs[:, step])
                tokens[:, step] = fed
        return Draft(tokens=tokens, probs=probs)

    def _forward(self, fed: torch.Tensor, block: Block, step: int) -> torch.Tensor:
        """One decode step: [B] tokens in, [B, V] logits out."""
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=fed.shape[0],
            input_ids=fed,
            req_pool_indices=block.req_pool_indices,
            seq_lens=block.start + (step + 1),
            out_cache_loc=block.cache_locs[:, step].contiguous(),
            seq_lens_sum=None,
            positions=block.positions[:, step].contiguous(),
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        output = self.model_runner.model.forward(
            forward_batch.input_ids, forward_batch.positions, forward_batch
        )
        return output.next_token_logits
