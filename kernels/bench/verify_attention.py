"""Bench of verify attention: python -m s3r_sglang.kernels.bench.verify_attention.

Counted traffic: K and V once, and the scores written. FlashAttention 3, the engine's default verify backend
on Hopper, runs on the same inputs for comparison.
"""

from collections.abc import Callable
from typing import Any

import torch
from s3r_sglang.kernels.bench import _harness
from s3r_sglang.kernels.bench.attention_scores import RECENT_WINDOW, exact_lse, make_inputs
from s3r_sglang.kernels.ops.verify_attention import _launch_kernels
from s3r_sglang.kernels.reference.verify_attention import verify_attention as reference

OP = "verify_attention"
SWEEP = _harness.grid(block_n=[32, 64, 128], num_splits=[1, 2, 4], num_warps=[4, 8], num_stages=[2, 3])


def make_case(inputs: _harness.PagedInputs, variant: str, tiles: dict[str, Any]) -> _harness.Case:
    shape = inputs.shape
    with_scores = variant == "with scores"
    caches = (inputs.k_cache, inputs.v_cache, inputs.req_to_token)
    out = torch.empty_like(inputs.q[0])
    scoring = (None, None, None)
    if with_scores:
        scores = torch.zeros(shape.batch_size, shape.num_kv_heads, shape.seq_len, device="cuda")
        candidates = torch.full_like(inputs.seq_lens, shape.seq_len - RECENT_WINDOW)
        scoring = (exact_lse(inputs), candidates, scores)

    def call(turn: int):
        _launch_kernels(
            inputs.q[turn], *caches, inputs.req_pool_indices, inputs.seq_lens, inputs.scale, *scoring, out,
            **tiles,
        )  # fmt: skip

    if variant == "fa3":
        call = _flash_attention_3(inputs, out)

    def check():
        call(0)
        sample = tuple(None if tensor is None else tensor[:2] for tensor in scoring)
        if with_scores:
            sample = (*sample[:2], torch.zeros_like(scores[:2]))
        want = reference(
            inputs.q[0, :2], *caches, inputs.req_pool_indices[:2], inputs.seq_lens[:2], inputs.scale, *sample
        )
        _harness.assert_close("out", out[:2], want)
        if with_scores:
            _harness.assert_close("scores", scores[:2], sample[2])

    positions = shape.batch_size * shape.num_kv_heads * shape.seq_len
    row_bytes = 2 * inputs.k_cache.element_size() * shape.head_dim
    return _harness.Case(
        calls=[lambda turn=turn: call(turn) for turn in range(_harness.ROTATION)],
        bytes_per_call=positions * (row_bytes + (4 if with_scores else 0)),
        check=check,
    )


def _flash_attention_3(inputs: _harness.PagedInputs, out: torch.Tensor) -> Callable[[int], None]:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache  # loads on Hopper only

    seq_lens = inputs.seq_lens.int()

    def call(turn: int):
        flash_attn_with_kvcache(
            inputs.q[turn],
            inputs.k_cache.unsqueeze(1),  # pages of one position
            inputs.v_cache.unsqueeze(1),
            cache_seqlens=seq_lens,
            page_table=inputs.req_to_token,
            softmax_scale=inputs.scale,
            causal=True,
            out=out,
        )

    return call


BENCH = _harness.Bench(
    OP,
    _harness.SHAPES,
    make_inputs,
    make_case,
    ["plain", "with scores", "fa3"],
    SWEEP,
    baselines=("fa3",),
    small=_harness.SMALL,
)

if __name__ == "__main__":
    _harness.main(BENCH)
