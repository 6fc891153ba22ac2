"""The verify stage: one dense forward over the bonus token and the k drafts of every request."""

from __future__ import annotations

import torch

from s3r_sglang.sglang_symbols import ForwardMode, GenerationBatchResult, ScheduleBatch, TpModelWorker
from s3r_sglang.types import Block, Draft, S3RVerifyInput


def verify(
    target_worker: TpModelWorker, batch: ScheduleBatch, block: Block, draft: Draft
) -> GenerationBatchResult:
    """Attend densely at positions L … L + k (arXiv 2610.13202, section 4, "Full-Attention Verification").

    It overwrites the provisional KV of the block with dense values, and the dense backend refreshes the index.
    The caller's `batch` is turned into a verify batch; SGLang undoes that after the worker returns.

    Returns:
        SGLang's result, with `logits_output.next_token_logits` of shape [B * (k + 1), V].
    """
    tokens = torch.cat([block.bonus_tokens[:, None], draft.tokens], dim=1)
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.input_ids = tokens.flatten()
    batch.out_cache_loc = block.cache_locs.flatten()
    batch.spec_info = S3RVerifyInput(
        draft_token=batch.input_ids,
        positions=block.positions.flatten(),
        draft_token_num=tokens.shape[1],
    )
    return target_worker.forward_batch_generation(batch, is_verify=True)
