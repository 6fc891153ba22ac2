"""Refresh scores in plain PyTorch: mean dense attention weight of each position."""

import torch
from s3r_sglang.kernels.reference._checks import check_shapes
from s3r_sglang.kernels.reference.batching import parts


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
    grouped_q = q.unflatten(2, (k_cache.shape[1], -1)).float().permute(0, 2, 1, 3, 4)  # [B, Hkv, Q, G, D]
    num_rows, group = grouped_q.shape[2:4]
    for part in parts(torch.where(num_candidates > 0, seq_lens, 0)):
        lengths = seq_lens[part, None]
        place = torch.arange(int(lengths.max()), device=q.device)
        # Padding reads the request's last row once more, and no query sees it.
        rows = req_to_token[req_pool_indices[part, None], place.minimum(lengths - 1)].long()
        k = k_cache[rows].float().permute(0, 2, 3, 1)  # [b, Hkv, D, n]
        logits = grouped_q[part].flatten(2, 3) @ k * scale
        query = torch.arange(num_rows, device=q.device)
        unseen = place > (lengths - num_rows + query)[..., None]  # [b, Q, n]
        is_counted = query >= num_rows - num_queries[part, None]
        logits = logits.unflatten(2, (num_rows, group)).masked_fill_(unseen[:, None, :, None], -torch.inf)
        weights = torch.where(is_counted[:, None, :, None, None], logits.softmax(dim=-1), 0)
        scores = weights.sum(dim=(2, 3)) / (num_queries[part] * group).clamp(min=1)[:, None, None]
        is_candidate = (place < num_candidates[part, None])[:, None]
        out[part, :, : len(place)] = torch.where(is_candidate, scores, out[part, :, : len(place)])
    return out
