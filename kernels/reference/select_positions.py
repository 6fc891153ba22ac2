"""Index selection in plain PyTorch: the highest-scored positions per request and KV head."""

import torch


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
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    batch = zip(req_pool_indices.tolist(), num_candidates.tolist(), num_select.tolist(), strict=True)
    for b, (slot, candidates, count) in enumerate(batch):
        if not 0 <= count <= min(candidates, positions.shape[2]):
            raise ValueError(
                f"num_select[{b}] = {count} must be between 0 and the smaller of num_candidates[{b}] = "
                f"{candidates} and the width of positions, {positions.shape[2]}"
            )
        # A stable descending sort keeps equal scores in order of position: the lower position wins.
        order = scores[b, :, :candidates].sort(dim=-1, descending=True, stable=True).indices
        chosen = order[:, :count].sort(dim=-1).values
        positions[slot, :, :count] = chosen.to(positions.dtype)
