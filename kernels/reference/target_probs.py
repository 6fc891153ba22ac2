"""Filtered target distributions in plain PyTorch."""

import torch
from s3r_sglang.kernels.reference import chain_sampling

# Filters sort, with about 40 B of temporaries per probability: 0.7 GB for a chunk of this many instead of
# 11 GB for B = 256, k = 6, V = 151,936 at once.
_FILTER_CHUNK = 1 << 24


def target_probs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    out: torch.Tensor,
    filtered: bool = True,
    max_top_k: int | None = None,
) -> torch.Tensor:
    """softmax(logits / temperature), the one-hot argmax for greedy rows, filtered: see `filter_probs`.

    Args:
        logits: [B * R, V], any floating dtype; the R rows of a request are adjacent.
        temperatures: [B] float32, positive.
        top_ks: [B] integer; at most 1 is greedy, V and more are off.
        top_ps, min_ps: [B] float32; 1 and 0 are off.
        out: [B * R, V] float32.
        filtered: whether any request has a filter; False saves the sort.
        max_top_k: a bound on all top_ks, so that filters rank that many tokens only; None means V.

    Returns:
        `out`.
    """
    grouped = logits.view(len(temperatures), -1, logits.shape[-1])
    probs = chain_sampling.softmax_probs(grouped, temperatures, top_ks <= 1)
    if filtered:
        filters = (top_ks, top_ps, min_ps)
        requests_per_chunk = max(1, _FILTER_CHUNK // probs.shape[1:].numel())
        for part, *limits in zip(*(x.split(requests_per_chunk) for x in (probs, *filters)), strict=True):
            part.copy_(chain_sampling.filter_probs(part, *limits, max_top_k=max_top_k))
    return out.copy_(probs.view_as(logits))
