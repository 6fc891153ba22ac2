"""Shape checks of the attention references, which are also the engine's CPU path.

Without them a tensor that is too short would broadcast, or leave the rest of an output as it was allocated. The
ops have such checks too, in a module that needs Triton.
"""

import torch


def check_shapes(
    op: str, q: torch.Tensor, seq_lens: torch.Tensor, *caches: torch.Tensor, **new: torch.Tensor | None
) -> None:
    """Raise ValueError unless q [B, …, Hq, D], seq_lens [B], caches [pool, Hkv, D] and `new` [B, Hkv, D] fit."""
    batch, (heads, head_size) = len(seq_lens), q.shape[-2:]
    if q.shape[0] != batch:
        raise ValueError(f"{op}: q {tuple(q.shape)} does not fit {batch} requests")
    for cache in caches:
        if cache.dim() != 3 or cache.shape[2] != head_size or heads % cache.shape[1]:
            raise ValueError(f"{op}: cache {tuple(cache.shape)} does not fit q {tuple(q.shape)}")
    for name, rows in new.items():
        if rows is not None and rows.shape != (shape := (batch, caches[0].shape[1], head_size)):
            raise ValueError(f"{op}: {name} must be {shape}, got {tuple(rows.shape)}")
