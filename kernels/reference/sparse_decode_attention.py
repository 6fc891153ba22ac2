"""Sparse decode attention in plain PyTorch: the draft's attention over index and tail."""

import torch
from s3r_sglang.kernels.reference._checks import check_shapes
from s3r_sglang.kernels.reference.batching import parts


def sparse_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    num_selected: torch.Tensor,
    tail_start: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    new_k: torch.Tensor | None = None,
    new_v: torch.Tensor | None = None,
) -> torch.Tensor:
    """Contract of `s3r_sglang.kernels.ops.sparse_decode_attention`; gathers only the rows attended to.

    This is also the engine's CPU path, hence no mask over the whole pool.
    """
    check_shapes("sparse_decode_attention", q, seq_lens, k_cache, v_cache, new_k=new_k, new_v=new_v)
    out = torch.empty_like(q) if out is None else out
    if new_k is not None and new_v is not None:
        live = seq_lens > 0
        newest = req_to_token[req_pool_indices[live], seq_lens[live] - 1].long()
        k_cache[newest], v_cache[newest] = new_k[live], new_v[live]
    grouped_q = q.unflatten(1, (k_cache.shape[1], -1)).float()  # [B, Hkv, G, D]
    heads = torch.arange(k_cache.shape[1], device=q.device)[:, None]
    tail_length = (seq_lens - tail_start[req_pool_indices]).clamp(min=0)
    attended = torch.where(seq_lens > 0, num_selected[req_pool_indices] + tail_length, 0)
    out[attended == 0] = 0
    if lse is not None:
        lse[attended == 0] = -torch.inf
    for part in parts(attended):
        slots = req_pool_indices[part]
        place = torch.arange(int(attended[part].max()), device=q.device)
        # Places of a request: its selected positions, its tail, and for padding the first of these once more.
        selected = positions[slots][:, :, place.clamp(max=positions.shape[2] - 1)]  # [b, Hkv, n]
        tail = (tail_start - num_selected)[slots, None, None] + place
        position = torch.where(place < num_selected[slots, None, None], selected, tail)
        is_padding = (place >= attended[part, None])[:, None]  # [b, 1, n]
        position = torch.where(is_padding, position[:, :, :1], position)
        rows = req_to_token[slots[:, None, None], position].long()
        logits = grouped_q[part] @ k_cache[rows, heads].float().transpose(2, 3) * scale  # [b, Hkv, G, n]
        logits.masked_fill_(is_padding[:, :, None], -torch.inf)
        weighted = logits.softmax(dim=-1) @ v_cache[rows, heads].float()
        out[part] = weighted.flatten(1, 2).to(out.dtype)
        if lse is not None:
            lse[part] = logits.logsumexp(dim=-1).flatten(1)
    return out
