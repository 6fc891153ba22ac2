"""Sparse decode attention in plain PyTorch: the draft's attention over index and tail, request by request."""

import torch
from s3r_sglang.kernels.reference._checks import check_shapes


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
    num_kv_heads = k_cache.shape[1]
    heads = torch.arange(num_kv_heads, device=q.device)[:, None]
    for b, (slot, seq_len) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        if seq_len == 0:
            out[b] = 0
            if lse is not None:
                lse[b] = -torch.inf
            continue
        token_rows = req_to_token[slot]
        if new_k is not None and new_v is not None:
            newest = token_rows[seq_len - 1].long()
            k_cache[newest], v_cache[newest] = new_k[b], new_v[b]
        selected = token_rows[positions[slot, :, : int(num_selected[slot])].long()].long()
        tail = token_rows[int(tail_start[slot]) : seq_len].long()
        rows = torch.cat([selected, tail.expand(num_kv_heads, -1)], dim=1)  # [Hkv, n]
        k = k_cache[rows, heads].float()  # [Hkv, n, D]
        v = v_cache[rows, heads].float()
        grouped_q = q[b].reshape(num_kv_heads, -1, q.shape[-1]).float()  # [Hkv, G, D]
        logits = grouped_q @ k.transpose(1, 2) * scale
        out[b] = (logits.softmax(dim=-1) @ v).reshape(q.shape[1:]).to(out.dtype)
        if lse is not None:
            lse[b] = logits.logsumexp(dim=-1).reshape(-1)
    return out
