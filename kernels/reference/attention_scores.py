"""Refresh scores in plain PyTorch: mean dense attention weight of each position, request by request."""

import torch
from s3r_sglang.kernels.reference._checks import check_shapes


def attention_scores(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    num_queries: torch.Tensor,
    num_candidates: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Contract of `s3r_sglang.kernels.ops.attention_scores`; the exact rule that defines the index.

    `lse` would only save work, so it is not read here.
    """
    check_shapes("attention_scores", q, seq_lens, k_cache)
    num_kv_heads = k_cache.shape[1]
    batch = zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        num_queries.tolist(),
        num_candidates.tolist(),
        strict=True,
    )
    for b, (slot, seq_len, valid, candidates) in enumerate(batch):
        if candidates == 0:
            continue
        if valid == 0:
            out[b, :, :candidates] = 0
            continue
        k = k_cache[req_to_token[slot, :seq_len].long()].float()  # [seq_len, Hkv, D]
        queries = q[b, -valid:].unflatten(1, (num_kv_heads, -1)).float()  # [valid, Hkv, G, D]
        # [Hkv, valid * G, seq_len]: the heads as the batch keeps this one matmul per KV head.
        logits = queries.permute(1, 0, 2, 3).flatten(1, 2) @ k.permute(1, 2, 0) * scale
        logits = logits.unflatten(1, (valid, -1))
        # Only the last `valid - 1` positions are hidden from any query.
        newest = logits[..., seq_len - valid :]
        unseen = torch.ones(valid, valid, dtype=torch.bool, device=q.device).triu(1)
        newest.masked_fill_(unseen[:, None, :], -torch.inf)
        out[b, :, :candidates] = logits.softmax(dim=-1).mean(dim=(1, 2))[:, :candidates]
    return out
