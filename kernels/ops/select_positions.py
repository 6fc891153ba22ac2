"""Index selection: the highest-scored positions per request and KV head (arXiv 2610.13202, section 3.2)."""

import torch
import triton
import triton.language as tl
from s3r_sglang.kernels.ops import _checks

OP = "select_positions"


def select_positions(
    scores: torch.Tensor,
    num_candidates: torch.Tensor,
    num_select: torch.Tensor,
    req_pool_indices: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Write the positions of the num_select[b] highest of scores[b, h, :num_candidates[b]], ascending.

    They go to positions[req_pool_indices[b], h, :num_select[b]]; its other entries are left as they are. Of
    equal scores (-0 equals 0) the lower position wins, so the result is a function of the scores alone.

    Args:
        scores: [B, Hkv, S] float32 without NaN.
        num_candidates: [B] integer, at most S.
        num_select: [B] integer, from 0 to min(num_candidates[b], M); larger values are clamped.
        req_pool_indices: [B] integer, slot of each request, distinct where num_select is not 0.
        positions: [slots, Hkv, M] int32, written in place.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
        RuntimeError: the tensors are on the CPU and Triton's interpreter is off.

    Safe in a CUDA graph: the grid depends on shapes only.
    """
    batch_size, num_kv_heads, _ = scores.shape
    _checks.check_device(OP, scores, num_candidates, num_select, req_pool_indices, positions)
    _checks.check_output(OP, "scores", scores, tuple(scores.shape), torch.float32)
    _checks.check_vectors(
        OP,
        batch_size,
        num_candidates=num_candidates,
        num_select=num_select,
        req_pool_indices=req_pool_indices,
    )
    shape = (positions.shape[0], num_kv_heads, positions.shape[-1])
    _checks.check_output(OP, "positions", positions, shape, torch.int32)
    _launch_kernel(scores, num_candidates, num_select, req_pool_indices, positions)


def _launch_kernel(
    scores, num_candidates, num_select, req_pool_indices, positions, block_n=None, num_warps=None
):
    """Launch with explicit tile choices; the bench sweeps them."""
    batch_size, num_kv_heads, width = scores.shape
    if scores.numel() == 0 or positions.numel() == 0:
        return
    # Eight scores a thread take 80 registers on sm_90, which lets three programs share an SM; with sixteen
    # (156 registers) each would be alone, and every reduction's latency exposed.
    if block_n is None:
        block_n = min(2048, max(128, triton.next_power_of_2(width)))
    if num_warps is None:
        num_warps = max(1, block_n // 256)
    aligned = all(size % 4 == 0 for size in (width, scores.stride(0), scores.stride(1)))
    _select_kernel[(num_kv_heads, batch_size)](
        scores, num_candidates, num_select, req_pool_indices, positions,
        scores.stride(0), scores.stride(1), positions.stride(0), positions.stride(1), positions.shape[2],
        BLOCK_N=block_n, ALIGN=4 if aligned else 1, num_warps=num_warps,
    )  # fmt: skip


@triton.jit
def _ordered_keys(scores, position, count, ALIGN: tl.constexpr):
    """Scores as int32 in the order of the floats; positions from `count` on sort below everything.

    The load is masked in steps of ALIGN scores, else the compiler cannot use 16-byte loads.
    """
    score = tl.load(scores + position, mask=position < tl.cdiv(count, ALIGN) * ALIGN, other=0.0)
    score = tl.where(score == 0.0, 0.0, score)  # -0 has other bits than 0 but must tie with it
    bits = score.to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(position < count, keys, -0x80000000)


@triton.jit
def _select_kernel(
    scores, num_candidates, num_select, req_pool_indices, positions,
    stride_score_batch, stride_score_head, stride_pos_slot, stride_pos_head, width,
    BLOCK_N: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Narrow a range of keys until whole ranges meet the count, then compact in order of position.

    The key of the count-th highest score always lies in low .. high. A pass over the scores cuts the range
    into four; all scores above it are selected. The search ends when all scores in the range are selected
    too, at the latest with a range of one key, in which the lowest positions win the tie. Three comparisons
    a score cost less than a histogram of 256 bins, which Triton builds from eight ballots a score.
    """
    kv_head, batch = tl.program_id(0), tl.program_id(1)
    candidates = tl.load(num_candidates + batch).to(tl.int32)
    count = tl.minimum(tl.load(num_select + batch).to(tl.int32), tl.minimum(candidates, width))
    if count <= 0:
        return
    slot = tl.load(req_pool_indices + batch).to(tl.int64)
    row = scores + batch.to(tl.int64) * stride_score_batch + kv_head * stride_score_head
    selected = positions + slot * stride_pos_slot + kv_head * stride_pos_head
    lane = tl.arange(0, BLOCK_N)

    low = tl.full([], -0x80000000, tl.int32)
    high = tl.full([], 0x7FFFFFFF, tl.int32)
    quarter = tl.full([], 1 << 30, tl.int32)
    above = tl.full([], 0, tl.int32)  # scores above the range
    not_below = candidates  # scores above or in the range
    while (high > low) & (not_below > count):
        second = low + quarter
        third = second + quarter
        fourth = third + quarter
        # Three counters of 10 bits a lane (a lane sees one score per tile), three of 21 bits in their sum.
        counters = tl.zeros([BLOCK_N], tl.int32)
        for start in range(0, candidates, BLOCK_N):
            keys = _ordered_keys(row, start + lane, candidates, ALIGN)
            counters += tl.where(keys >= second, 1, 0)
            counters += tl.where(keys >= third, 1 << 10, 0)
            counters += tl.where(keys >= fourth, 1 << 20, 0)
        wide = counters.to(tl.int64)
        packed = (wide & 0x3FF) + (((wide >> 10) & 0x3FF) << 21) + ((wide >> 20) << 42)
        packed = tl.sum(packed, axis=0)
        count_second = (packed & 0x1FFFFF).to(tl.int32)
        count_third = ((packed >> 21) & 0x1FFFFF).to(tl.int32)
        count_fourth = (packed >> 42).to(tl.int32)
        if count_fourth >= count:
            low = fourth
            not_below = count_fourth
        elif count_third >= count:
            low = third
            not_below = count_third
            above = count_fourth
        elif count_second >= count:
            low = second
            not_below = count_second
            above = count_third
        else:
            above = count_second
        high = low + (quarter - 1)
        quarter = quarter >> 2

    from_range = count - above
    above_seen = tl.full([], 0, tl.int32)
    range_seen = tl.full([], 0, tl.int32)
    for start in range(0, candidates, BLOCK_N):
        position = start + lane
        keys = _ordered_keys(row, position, candidates, ALIGN)
        is_above = (keys > high).to(tl.int32)
        in_range = ((keys >= low) & (keys <= high) & (position < candidates)).to(tl.int32)
        # Both running counts in one scan, 16 bits each: a tile is far shorter than 2**15.
        running = tl.cumsum((is_above << 16) + in_range, axis=0)
        above_before = above_seen + (running >> 16) - is_above
        range_before = range_seen + (running & 0xFFFF) - in_range
        chosen = (is_above == 1) | ((in_range == 1) & (range_before < from_range))
        rank = above_before + tl.minimum(range_before, from_range)
        tl.store(selected + rank, position, mask=chosen)
        above_seen += tl.sum(is_above, axis=0)
        range_seen += tl.sum(in_range, axis=0)
