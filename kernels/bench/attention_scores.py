"""Bench of refresh scores: python -m s3r_sglang.kernels.bench.attention_scores.

Counted traffic: K once per pass (two passes, or one when the log-sum-exp is given) and the scores written.
"""

import functools
from typing import Any

import torch
from s3r_sglang.kernels.bench import _harness
from s3r_sglang.kernels.ops.attention_scores import _launch_kernels
from s3r_sglang.kernels.reference.attention_scores import attention_scores as reference
from s3r_sglang.kernels.reference.sparse_decode_attention import sparse_decode_attention as dense_reference

OP = "attention_scores"
QUERIES, RECENT_WINDOW = 7, 64
SWEEP = _harness.grid(block_n=[64, 128], num_splits=[1, 2, 4], num_warps=[4, 8], num_stages=[2, 3])


def make_inputs(shape: _harness.Shape) -> _harness.PagedInputs:
    return _harness.paged_inputs(shape, QUERIES)


@functools.lru_cache(maxsize=1)
def exact_lse(inputs: _harness.PagedInputs) -> torch.Tensor:
    """[B, Q, Hq] float32 by the dense reference, query by query."""
    q = inputs.q[0]
    lse = torch.empty(q.shape[:3], device="cuda")
    nothing = torch.zeros(len(q), inputs.shape.num_kv_heads, 1, dtype=torch.int32, device="cuda")
    none = nothing[:, 0, 0].contiguous()
    for i in range(QUERIES):
        dense_reference(
            q[:, i], inputs.k_cache, inputs.k_cache, inputs.req_to_token, inputs.req_pool_indices,
            inputs.seq_lens - QUERIES + i + 1, nothing, none, none, inputs.scale, lse=lse[:, i],
        )  # fmt: skip
    return lse


def make_case(inputs: _harness.PagedInputs, variant: str, tiles: dict[str, Any]) -> _harness.Case:
    shape = inputs.shape
    vectors = (
        inputs.seq_lens,
        torch.full_like(inputs.seq_lens, QUERIES),
        torch.full_like(inputs.seq_lens, shape.seq_len - RECENT_WINDOW),
    )
    caches = (inputs.k_cache, inputs.req_to_token)
    out = torch.zeros(shape.batch_size, shape.num_kv_heads, shape.seq_len, device="cuda")
    one_pass = variant == "lse given"
    # The rotating queries share one log-sum-exp: right for the checked call, and of the right size for all.
    lse = exact_lse(inputs) if one_pass else None

    def call(turn: int):
        _launch_kernels(
            inputs.q[turn], *caches, inputs.req_pool_indices, *vectors, inputs.scale, out, lse, **tiles
        )

    def check():
        call(0)
        want = torch.zeros_like(out[:2])
        sample = (vector[:2] for vector in (inputs.req_pool_indices, *vectors))
        reference(inputs.q[0, :2], *caches, *sample, inputs.scale, want)
        _harness.assert_close("scores", out[:2], want)

    positions = shape.batch_size * shape.num_kv_heads * shape.seq_len
    key_bytes = inputs.k_cache.element_size() * shape.head_dim
    return _harness.Case(
        calls=[lambda turn=turn: call(turn) for turn in range(_harness.ROTATION)],
        bytes_per_call=positions * ((1 if one_pass else 2) * key_bytes + 4),
        check=check,
    )


BENCH = _harness.Bench(
    OP, _harness.SHAPES, make_inputs, make_case, ["two passes", "lse given"], SWEEP, small=_harness.SMALL
)

if __name__ == "__main__":
    _harness.main(BENCH)
