"""Index selection in plain PyTorch: the highest-scored positions per request and KV head."""

import torch
from s3r_sglang.kernels.reference.batching import parts


def select_positions(
    scores: torch.Tensor,
    num_candidates: torch.Tensor,
    num_select: torch.Tensor,
    req_pool_indices: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Contract of `s3r_sglang.kernels.ops.select_positions`; additionally checks the caller's promise.

    Raises:
        ValueError: `num_select[b]` is negative or exceeds `num_candidates[b]` or the width of `positions`.
    """
    most = num_candidates.clamp(max=positions.shape[2])
    for b in ((num_select < 0) | (num_select > most)).nonzero()[:1].flatten().tolist():
        raise ValueError(
            f"num_select[{b}] = {int(num_select[b])} must be between 0 and the smaller of num_candidates[{b}] = "
            f"{int(num_candidates[b])} and the width of positions, {positions.shape[2]}"
        )
    for part in parts(torch.where(num_select > 0, num_candidates, 0)):
        slots, counts = req_pool_indices[part], num_select[part, None, None]
        place = torch.arange(int(num_candidates[part].max()), device=scores.device)
        known = scores[part, :, : len(place)]
        is_candidate = place < num_candidates[part, None, None]
        known = known.masked_fill(known.isnan() | ~is_candidate, -torch.inf)
        # A stable descending sort keeps equal scores in order of position: the lower position wins.
        order = known.sort(dim=-1, descending=True, stable=True).indices[..., : int(counts.max())]
        is_chosen = place[: order.shape[2]] < counts
        chosen = torch.where(is_chosen, order, len(place)).sort(dim=-1).values
        kept = positions[slots, :, : order.shape[2]]
        positions[slots, :, : order.shape[2]] = torch.where(is_chosen, chosen.to(positions.dtype), kept)
