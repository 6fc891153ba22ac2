"""The batch in which restored requests return to SGLang's scheduler."""

from __future__ import annotations

from typing import Any

import torch

from s3r_sglang.sglang_symbols import ForwardMode, Req, SamplingBatchInfo, ScheduleBatch
from s3r_sglang.types import S3RDraftInput


def decode_batch(scheduler: Any, reqs: list[Req]) -> ScheduleBatch:
    """A batch of requests that stand between two rounds, as the running batch holds them."""
    batch = ScheduleBatch.init_new(
        reqs=reqs,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        model_config=scheduler.model_config,
        enable_overlap=scheduler.enable_overlap,
        spec_algorithm=scheduler.spec_algorithm,
    )
    batch.forward_mode = ForwardMode.DECODE
    # Pinned: a copy from pageable memory would make the host wait for the round in flight.
    pin = torch.device(batch.device).type == "cuda"
    batch.req_pool_indices_cpu, batch.seq_lens_cpu, bonus_cpu = (
        torch.tensor(values, pin_memory=pin)
        for values in (
            [req.req_pool_idx for req in reqs],
            [req.kv_committed_len for req in reqs],
            [req.output_ids[-1] for req in reqs],
        )
    )
    batch.req_pool_indices, batch.seq_lens, bonus = (
        values.to(batch.device, non_blocking=True)
        for values in (batch.req_pool_indices_cpu, batch.seq_lens_cpu, bonus_cpu)
    )
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.multimodal_inputs = [None] * len(reqs)
    if batch.return_logprob:
        batch.top_logprobs_nums = [req.logprob.top_logprobs_num for req in reqs]
        batch.token_ids_logprobs = [req.logprob.token_ids_logprob for req in reqs]
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, scheduler.model_config.vocab_size)
    batch.spec_info = S3RDraftInput(bonus_tokens=bonus, new_seq_lens=batch.seq_lens)
    if scheduler.enable_overlap:
        # Bonus tokens and lengths lie in the future map still, under the slots that the requests have kept.
        batch.spec_info.future_indices = batch.req_pool_indices
    return batch
