"""Verify attention in plain PyTorch: dense causal attention of the last Q positions, request by request."""

import torch
from s3r_sglang.kernels.reference._checks import check_shapes


def verify_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    lse_estimate: torch.Tensor | None = None,
    num_candidates: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Contract of `s3r_sglang.kernels.ops.verify_attention`."""
    if len({lse_estimate is None, num_candidates is None, scores is None}) > 1:
        raise ValueError("verify_attention: lse_estimate, num_candidates and scores go together")
    check_shapes("verify_attention", q, seq_lens, k_cache, v_cache)
    out = torch.empty_like(q) if out is None else out
    num_queries, num_kv_heads = q.shape[1], k_cache.shape[1]
    for b, (slot, seq_len) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        if seq_len == 0:
            out[b] = 0
            continue
        rows = req_to_token[slot, :seq_len].long()
        k = k_cache[rows].float().transpose(0, 1)  # [Hkv, seq_len, D]
        v = v_cache[rows].float().transpose(0, 1)
        queries = q[b].unflatten(1, (num_kv_heads, -1)).float().permute(1, 0, 2, 3)  # [Hkv, Q, G, D]
        logits = (queries.flatten(1, 2) @ k.transpose(1, 2) * scale).unflatten(1, queries.shape[1:3])
        query_positions = torch.arange(seq_len - num_queries, seq_len, device=q.device)
        unseen = torch.arange(seq_len, device=q.device) > query_positions[:, None]  # [Q, seq_len]
        logits.masked_fill_(unseen[:, None, :], -torch.inf)
        attended = (logits.softmax(dim=-1).flatten(1, 2) @ v).unflatten(1, queries.shape[1:3])
        attended[:, query_positions < 0] = 0  # no such position: its softmax is over nothing
        out[b] = attended.permute(1, 0, 2, 3).reshape(q.shape[1:]).to(out.dtype)
        if scores is not None and lse_estimate is not None and num_candidates is not None:
            grouped_lse = lse_estimate[b].unflatten(1, (num_kv_heads, -1)).permute(1, 0, 2)[..., None]
            counted = grouped_lse > -torch.inf
            weights = torch.where(counted, (logits - grouped_lse).exp(), 0).sum(dim=(1, 2))
            candidates = int(num_candidates[b])
            num_counted = counted.sum(dim=(1, 2)).clamp(min=1)
            scores[b, :, :candidates] = (weights / num_counted)[:, :candidates]
    return out
