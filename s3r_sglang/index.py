"""The sparse index I: which positions a draft query reads, for each layer, request slot and KV head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from s3r_sglang.config import CEIL_SLACK, S3RConfig
from s3r_sglang.kernels import select_positions


def budget(committed: torch.Tensor, config: S3RConfig) -> torch.Tensor:
    """`S3RConfig.budget` of every request, on the device (arXiv 2610.13202, Eq. 17).

    Args:
        committed: [B] integers, |C|.

    Returns:
        [B] of the same dtype.
    """
    fraction = torch.ceil(committed.to(torch.float64) * config.budget_ratio - CEIL_SLACK).to(committed.dtype)
    return torch.minimum(committed, fraction.clamp(min=config.min_budget))


@dataclass(frozen=True)
class Plan:
    """One refresh of the index, for the requests of one forward.

    Fields, each [B] int32:
        num_older: |C \\ R|, the candidates of the TopK.
        num_selected: how many of them are selected; 0 where the budget covers all of C.
        tail_start: first position of the contiguous tail that every draft query reads.
    """

    num_older: torch.Tensor
    num_selected: torch.Tensor
    tail_start: torch.Tensor


def plan_refresh(committed: torch.Tensor, config: S3RConfig) -> Plan:
    """Split the budget of each request into the recent window R and the selection TopK_{K-|R|}.

    A context that fits its budget needs no selection: its tail starts at position 0.
    """
    total = budget(committed, config)
    recent = total.clamp(max=config.recent_window)
    dense = total >= committed
    older = committed - recent
    zero = torch.zeros_like(committed)
    return Plan(
        num_older=older.to(torch.int32),
        num_selected=torch.where(dense, zero, total - recent).to(torch.int32),
        tail_start=torch.where(dense, zero, older).to(torch.int32),
    )


class SparseIndex:
    """Index views into the one KV pool, for all request slots.

    A draft query at position t of slot r reads, in layer l and KV head h, the positions
    `positions[l][r, h, :num_selected[r]]` and the tail `tail_start[r] … t`. The tail holds the recent window
    and every position written since the index was made, so drafting needs no update of the index.

    Memory: 4 bytes x layers x slots x KV heads x capacity, where capacity is the largest selection that the
    context length allows; the Qwen3-8B shape with 256 slots, s = 0.05 and 24K tokens takes 0.34 GB.

    Args:
        num_layers: the model's.
        num_slots: request slots of SGLang's request pool.
        num_kv_heads: per tensor-parallel rank.
        max_context: longest context in tokens.
    """

    def __init__(
        self,
        config: S3RConfig,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_context: int,
        device: torch.device | str,
    ) -> None:
        self.config = config
        capacity = selection_capacity(config, max_context)
        shape = (num_layers, num_slots, num_kv_heads, capacity)
        self.positions = torch.zeros(shape, dtype=torch.int32, device=device)
        self.num_selected = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.tail_start = torch.zeros(num_slots, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.num_selected.nbytes + self.tail_start.nbytes

    def begin_refresh(self, req_pool_indices: torch.Tensor, committed: torch.Tensor) -> Plan:
        """Plan a refresh and record its extent; `select` then fills in one layer after the other."""
        plan = plan_refresh(committed, self.config)
        self.num_selected[req_pool_indices] = plan.num_selected
        self.tail_start[req_pool_indices] = plan.tail_start
        return plan

    def select(self, layer: int, scores: torch.Tensor, plan: Plan, req_pool_indices: torch.Tensor) -> None:
        """Select the highest-scoring older positions of one layer.

        Args:
            scores: [B, Hkv, S] fp32 mean attention weights, valid for positions below `plan.num_older`.
        """
        select_positions(scores, plan.num_older, plan.num_selected, req_pool_indices, self.positions[layer])

    def clear(self) -> None:
        """Forget every index; a slot without one drafts with full attention."""
        self.num_selected.zero_()
        self.tail_start.zero_()


def selection_capacity(config: S3RConfig, max_context: int) -> int:
    """Positions that the longest selection can hold; at least 1 to keep the buffers non-empty.

    A budget that covers the longest context covers the shorter ones too, and then nothing is selected.
    """
    longest = config.budget(max_context)
    return 1 if longest >= max_context else max(1, longest - config.recent_window)
