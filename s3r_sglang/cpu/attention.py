"""Full attention on a CPU, for prefill and verification.

SGLang's `torch_native` backend has no verify mode, and attends with as many query rows as there are keys; a
verification has k + 1 queries over thousands of keys.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

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
        end = 0
        rows = zip(
            req_pool_indices.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True
        )
        for slot, prefix, length in rows:
            begin, end = end, end + length
            cache = req_to_token[slot, : prefix + length]
            queries = torch.arange(prefix, prefix + length)[:, None]
            seen = torch.arange(prefix + length) <= queries if prefix else None
            attended = scaled_dot_product_attention(
                query[begin:end].movedim(0, 1)[None],
                k_cache[cache].movedim(0, 1)[None].to(query.dtype),
                v_cache[cache].movedim(0, 1)[None].to(query.dtype),
                attn_mask=seen,
                is_causal=seen is None,
                scale=scaling,
                enable_gqa=enable_gqa,
            )
            output[begin:end] = attended[0].movedim(1, 0)
        return output
