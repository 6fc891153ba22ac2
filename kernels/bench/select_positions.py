"""Bench of index selection: python -m s3r_sglang.kernels.bench.select_positions.

Counted traffic: the scores once. They are read twice, the second time mostly from the L1 and L2 caches, and
instructions bound the op, so the time is what matters: it is paid per layer and round.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from s3r_sglang.kernels.bench import _harness
from s3r_sglang.kernels.ops.select_positions import _launch_kernel
from s3r_sglang.kernels.reference.select_positions import select_positions as reference

OP = "select_positions"
BUDGET_RATIO, MIN_BUDGET, RECENT_WINDOW = 0.05, 192, 64
SWEEP = _harness.grid(block_n=[512, 1024, 2048], num_warps=[2, 4, 8])


@dataclass(frozen=True)
class Inputs:
    shape: _harness.Shape
    scores: torch.Tensor  # [ROTATION, B, Hkv, S]
    count: int


def make_inputs(shape: _harness.Shape) -> Inputs:
    size = (_harness.ROTATION, shape.batch_size, shape.num_kv_heads, shape.seq_len)
    # Attention weights spread over many powers of two.
    scores = (3 * torch.randn(size, device="cuda")).softmax(dim=-1)
    candidates = shape.seq_len - RECENT_WINDOW
    budget = max(MIN_BUDGET, math.ceil(BUDGET_RATIO * shape.seq_len))
    return Inputs(shape, scores, min(budget - RECENT_WINDOW, candidates))


def make_case(inputs: Inputs, variant: str, tiles: dict[str, Any]) -> _harness.Case:
    shape = inputs.shape
    slots = torch.arange(shape.batch_size, device="cuda")
    candidates = torch.full_like(slots, shape.seq_len - RECENT_WINDOW)
    counts = torch.full_like(slots, inputs.count)
    width = (shape.batch_size, shape.num_kv_heads, inputs.count)
    positions = torch.full(width, -1, dtype=torch.int32, device="cuda")

    def call(turn: int):
        _launch_kernel(inputs.scores[turn], candidates, counts, slots, positions, **tiles)

    def check():
        call(0)
        want = torch.empty_like(positions[:2])
        reference(inputs.scores[0, :2], candidates[:2], counts[:2], slots[:2], want)
        assert torch.equal(positions[:2], want), "positions differ"

    return _harness.Case(
        calls=[lambda turn=turn: call(turn) for turn in range(_harness.ROTATION)],
        bytes_per_call=inputs.scores[0].nbytes,
        check=check,
    )


BENCH = _harness.Bench(OP, _harness.SHAPES, make_inputs, make_case, ["plain"], SWEEP, small=_harness.SMALL)

if __name__ == "__main__":
    _harness.main(BENCH)
