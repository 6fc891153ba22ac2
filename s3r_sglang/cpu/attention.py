"""Full attention on a CPU, for prefill and verification.

SGLang's `torch_native` backend has no verify mode, and attends with as many query rows as there are keys; a
verification has k + 1 queries over thousands of keys.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from s3r_sglang.kernels.reference.batching import MAX_POSITIONS
from s3r_sglang.sglang_symbols import ForwardBatch, TorchNativeAttnBackend


class CPUAttention(TorchNativeAttnBackend):
    """`torch_native` with a verify mode, and with query rows only where there are queries."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            block = forward_batch.spec_info.draft_token_num
            forward_batch.extend_prefix_lens = forward_batch.seq_lens
            forward_batch.extend_seq_lens = torch.full_like(forward_batch.seq_lens, block)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        """Raises ValueError for tensors with fewer rows than tokens, which would broadcast or stay undefined."""
        tokens = int(forward_batch.extend_seq_lens.sum())
        for name, rows in (("q", q), ("k", k), ("v", v)):
            if rows is not None and len(rows) < tokens:
                raise ValueError(f"layer {layer.layer_id}: {name} has {len(rows)} rows for {tokens} tokens")
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        *args,
        scaling: float | None = None,
        enable_gqa: bool = False,
        **kwargs,
    ) -> torch.Tensor:
        ends = extend_seq_lens.cumsum(0)
        kinds, kind_of = torch.stack([extend_prefix_lens, extend_seq_lens]).unique(dim=1, return_inverse=True)
        for kind, (prefix, length) in enumerate(kinds.t().tolist()):
            if not length:
                continue
            # Requests of like shape side by side, a few thousand positions at a time.
            alike = (kind_of == kind).nonzero().flatten().split(max(1, MAX_POSITIONS // (prefix + length)))
            queries = torch.arange(prefix, prefix + length)[:, None]
            seen = torch.arange(prefix + length) <= queries if prefix else None
            for requests in alike:
                tokens = (ends[requests] - length)[:, None] + torch.arange(length)
                cache = req_to_token[req_pool_indices[requests], : prefix + length]
                attended = scaled_dot_product_attention(
                    query[tokens].transpose(1, 2),
                    k_cache[cache].transpose(1, 2).to(query.dtype),
                    v_cache[cache].transpose(1, 2).to(query.dtype),
                    attn_mask=seen,
                    is_causal=seen is None,
                    scale=scaling,
                    enable_gqa=enable_gqa,
                )
                output[tokens] = attended.transpose(1, 2)
        return output
