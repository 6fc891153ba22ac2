"""Bench of sparse decode attention: python -m s3r_sglang.kernels.bench.sparse_decode_attention.

Counted traffic: K and V of the attended positions and their int32 index entries. Rows are gathered from all
over the pool, other ones in each rotation. The variant "stores" is the engine's: normalisers, and the newest
token's K and V stored on the way.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from s3r_sglang.kernels.bench import _harness
from s3r_sglang.kernels.ops.sparse_decode_attention import _launch_kernel
from s3r_sglang.kernels.reference.sparse_decode_attention import sparse_decode_attention as reference

OP = "sparse_decode_attention"
BUDGET_RATIO, MIN_BUDGET, RECENT_WINDOW = 0.05, 192, 64
DRAFTED = 3  # positions written since the index was made, half way through a draft of 6
SWEEP = [
    *_harness.grid(block_n=[16, 32, 64], num_splits=[1, 2, 4], num_warps=[4], num_stages=[2, 3, 4]),
    *_harness.grid(block_n=[16, 32], num_splits=[1, 2], num_warps=[2], num_stages=[3, 4]),
    *_harness.grid(block_n=[16, 32], num_splits=[8, 16], num_warps=[4], num_stages=[3]),
]


@dataclass(frozen=True)
class Inputs:
    paged: _harness.PagedInputs
    positions: torch.Tensor  # [ROTATION, slots, Hkv, M] int32
    num_selected: torch.Tensor
    tail_start: torch.Tensor


def make_inputs(shape: _harness.Shape) -> Inputs:
    candidates = shape.seq_len - DRAFTED - RECENT_WINDOW
    budget = max(MIN_BUDGET, math.ceil(BUDGET_RATIO * shape.seq_len))
    count = min(budget - RECENT_WINDOW, candidates)
    # The `count` highest of random numbers are `count` random positions, all different.
    noise = torch.rand(_harness.ROTATION, shape.batch_size, shape.num_kv_heads, candidates, device="cuda")
    positions = noise.topk(count).indices.sort(dim=-1).values.int()
    ones = torch.ones(shape.batch_size, dtype=torch.int32, device="cuda")
    return Inputs(_harness.paged_inputs(shape, num_queries=1), positions, count * ones, candidates * ones)


def make_case(inputs: Inputs, variant: str, tiles: dict[str, Any]) -> _harness.Case:
    paged, shape = inputs.paged, inputs.paged.shape
    index = (inputs.num_selected, inputs.tail_start)
    caches = (paged.k_cache, paged.v_cache, paged.req_to_token)
    out = torch.empty_like(paged.q[0, :, 0])
    lse = torch.empty(out.shape[:2], device="cuda") if variant != "plain" else None
    newest = paged.req_to_token[:, -1].long()
    new = [paged.k_cache[newest], paged.v_cache[newest]] if variant == "stores" else [None, None]

    def call(turn: int):
        q, positions = paged.q[turn, :, 0], inputs.positions[turn]
        _launch_kernel(
            q,
            *caches,
            paged.req_pool_indices,
            paged.seq_lens,
            positions,
            *index,
            paged.scale,
            out,
            lse,
            *new,
            **tiles,
        )

    def check():
        call(0)
        want, want_lse = torch.empty_like(out[:2]), torch.empty_like(out[:2, :, 0], dtype=torch.float32)
        reference(
            paged.q[0, :2, 0], *caches, paged.req_pool_indices[:2], paged.seq_lens[:2], inputs.positions[0],
            *index, paged.scale, want, want_lse,
        )  # fmt: skip
        _harness.assert_close("out", out[:2], want)
        if lse is not None:
            _harness.assert_close("lse", lse[:2], want_lse)

    attended = inputs.positions.shape[-1] + RECENT_WINDOW + DRAFTED
    row_bytes = 2 * paged.k_cache.element_size() * shape.head_dim + 4
    return _harness.Case(
        calls=[lambda turn=turn: call(turn) for turn in range(_harness.ROTATION)],
        bytes_per_call=shape.batch_size * shape.num_kv_heads * attended * row_bytes,
        check=check,
    )


BENCH = _harness.Bench(
    OP, _harness.SHAPES, make_inputs, make_case, ["plain", "with lse", "stores"], SWEEP, small=_harness.SMALL
)

if __name__ == "__main__":
    _harness.main(BENCH)
