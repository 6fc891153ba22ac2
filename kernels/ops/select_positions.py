"""Index selection: the highest-scored positions per request and KV head (arXiv 2610.13202, section 3.2)."""

import torch
import triton
import triton.language as tl
from s3r_sglang.kernels.ops import _checks, _launch

OP = "select_positions"
# Scores per group of the shortlist's bound: up to one in GROUP can be selected before the bound is void.
GROUP = 8


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
        scores: [B, Hkv, S] float32; NaN counts as -inf.
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
    if block_n is None:
        # Larger programs where few share the device, as with long contexts. On an H200, 4 against 8 warps:
        # 64 x 8K 20.0 and 21.6 us, 32 x 16K 27.6 and 22.8, 16 x 32K 43.9 and 30.5, 1 x 8K 13.8 and 11.7.
        few = batch_size * num_kv_heads <= 2 * _launch.num_multiprocessors(scores.device)
        block_n, num_warps = (1024, 8) if few else (512, 4)
    # Twice the selection or all group maxima, in whole tiles; counts of 16 bits must suffice.
    wanted = max(2 * positions.shape[2], triton.cdiv(width, GROUP)) + 4
    max_shortlist = min(block_n * triton.cdiv(wanted, block_n), 2**16 - block_n)
    scratch = positions.new_empty(2, batch_size * num_kv_heads, max_shortlist)
    # Triton knows of divisibility by 16 only.
    aligned = all(size % 16 == 0 for size in (width, scores.stride(0), scores.stride(1)))
    _select_kernel[(num_kv_heads, batch_size)](
        scores, num_candidates, num_select, req_pool_indices, positions, scratch[0], scratch[1],
        scores.stride(0), scores.stride(1), positions.stride(0), positions.stride(1),
        positions.shape[2], max_shortlist,
        BLOCK_N=block_n, GROUP=GROUP, ALIGN=4 if aligned else 1, num_warps=num_warps,
    )  # fmt: skip


@triton.jit
def _flip_below_zero(bits):
    """Map the bits of floats to int32 in the order of the floats (keys), and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _ordered_keys(score):
    """Scores as int32 in their order. NaN would lie outside the range the search begins with."""
    score = tl.where(score == score, score, float("-inf"))
    score = tl.where(score == 0.0, 0.0, score)  # -0 has other bits than 0 but must tie with it
    return _flip_below_zero(score.to(tl.int32, bitcast=True))


@triton.jit
def _load_aligned(scores, index, n, ALIGN: tl.constexpr):
    """Scores at `index`; from n on anything.

    The load is masked in steps of ALIGN scores, else the compiler cannot use 16-byte loads.
    """
    return tl.load(scores + index, mask=index < tl.cdiv(n, ALIGN) * ALIGN, other=0.0)


@triton.jit
def _load_scores(scores, index, n, ALIGN: tl.constexpr):
    return tl.where(index < n, _load_aligned(scores, index, n, ALIGN), float("-inf"))


@triton.jit
def _load_keys(source, index, n, IS_ROW: tl.constexpr, ALIGN: tl.constexpr):
    """Keys of a row of scores, or of the scratch, where the padding is already below every key."""
    return _ordered_keys(_load_scores(source, index, n, ALIGN)) if IS_ROW else tl.load(source + index)


@triton.jit
def _search(
    source, n, low, high, count, enough, BLOCK_N: tl.constexpr, IS_ROW: tl.constexpr, ALIGN: tl.constexpr = 1
):
    """Narrow low .. high, which holds the count-th highest of n keys; returns it and the number above it.

    Ends when at most `enough` (>= count) keys are above or in the range, at the latest with a range of one
    key. A pass over the keys cuts the range into three: the instructions per bit are fewest with two counts,
    as they share one 32-bit reduction.
    """
    lane = tl.arange(0, BLOCK_N)
    above = tl.full([], 0, tl.int32)  # keys above the range
    not_below = n  # keys above or in the range
    while (high > low) & (not_below > enough):
        third = ((high - low).to(tl.uint32, bitcast=True) // 3 + 1).to(tl.int32, bitcast=True)
        middle = low + third
        upper = middle + third
        # Two counters of 16 bits a lane (a lane sees one key per tile).
        counters = tl.zeros([BLOCK_N], tl.int32)
        for start in range(0, n, BLOCK_N):
            keys = _load_keys(source, start + lane, n, IS_ROW, ALIGN)
            counters += tl.where(keys >= middle, 1, 0)
            counters += tl.where(keys >= upper, 1 << 16, 0)
        if IS_ROW:
            wide = (counters & 0xFFFF).to(tl.int64) + ((counters >> 16).to(tl.int64) << 32)
            packed = tl.sum(wide, axis=0)
            count_middle = (packed & 0xFFFFFFFF).to(tl.int32)
            count_upper = (packed >> 32).to(tl.int32)
        else:  # the scratch has fewer than 2**16 keys
            packed = tl.sum(counters, axis=0)
            count_middle = packed & 0xFFFF
            count_upper = (packed >> 16) & 0xFFFF
        if count_upper >= count:
            low = upper
            not_below = count_upper
        elif count_middle >= count:
            low = middle
            high = upper - 1
            not_below = count_middle
            above = count_upper
        else:
            high = middle - 1
            above = count_middle
    return low, high, above


@triton.jit
def _group_maxima(
    row, n, num_groups, maxima, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr
):
    """Store the key of each group's maximum; returns the lowest and the highest of them.

    Group i is the scores i, i + num_groups, i + 2 * num_groups, …: high weights cluster, and a cluster in one
    group would weaken the bound.
    """
    lane = tl.arange(0, BLOCK_N)
    lowest = tl.full([BLOCK_N], 0x7FFFFFFF, tl.int32)
    highest = tl.full([BLOCK_N], -0x80000000, tl.int32)
    last = (GROUP - 1) * num_groups  # where the only members begin that may be missing
    for start in range(0, num_groups, BLOCK_N):
        group = start + lane
        best = tl.full([BLOCK_N], float("-inf"), tl.float32)
        for member in tl.static_range(GROUP - 1):
            score = tl.load(row + member * num_groups + group, mask=group < num_groups, other=float("-inf"))
            best = tl.where(score > best, score, best)  # skips NaN, which Triton's maximum need not
        score = _load_scores(row + last, group, tl.minimum(n - last, num_groups), ALIGN)
        best = tl.where(score > best, score, best)
        keys = tl.where(group < num_groups, _ordered_keys(best), -0x80000000)
        tl.store(maxima + group, keys)
        lowest = tl.minimum(lowest, tl.where(group < num_groups, keys, 0x7FFFFFFF))
        highest = tl.maximum(highest, keys)
    return tl.min(lowest, axis=0), tl.max(highest, axis=0)


@triton.jit
def _quads(tile, QUADS: tl.constexpr):
    """Elements 0, 1, 2 and 3 of every four of a tile."""
    even, odd = tl.split(tl.reshape(tile, [QUADS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _is_listed(score, position, n, bound):
    """NaN is, whatever the bound: it is ranked as -inf, which may be the bound, and costs nothing here."""
    return ((score < bound) == 0) & (position < n)


@triton.jit
def _count_listed(quad, position, n, bound):
    listed = _is_listed(quad[0], position, n, bound).to(tl.int32)
    for member in tl.static_range(1, 4):
        listed += _is_listed(quad[member], position + member, n, bound).to(tl.int32)
    return listed


@triton.jit
def _store_listed(quad, position, n, bound, rank, short_positions, max_shortlist):
    fits = rank + 4 <= max_shortlist
    for member in tl.static_range(4):
        listed = _is_listed(quad[member], position + member, n, bound)
        tl.store(short_positions + rank, position + member, mask=listed & fits)
        rank += listed.to(tl.int32)


@triton.jit
def _make_shortlist(row, n, bound, short_positions, max_shortlist, TILE_N: tl.constexpr, ALIGN: tl.constexpr):
    """Compact the positions of the scores from `bound` on; returns their number.

    All are stored if the number is at most max_shortlist - 4. A lane takes the four scores of a 16-byte load:
    a scan of plain tiles would be compiled twice, in the layouts of the loads and of the scattered stores.
    """
    QUADS: tl.constexpr = TILE_N // 4
    index = tl.arange(0, TILE_N)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, n, 2 * TILE_N):
        left = _quads(_load_aligned(row, start + index, n, ALIGN), QUADS)
        right = _quads(_load_aligned(row, start + TILE_N + index, n, ALIGN), QUADS)
        position = start + 4 * tl.arange(0, QUADS)
        # The running counts of both tiles in one scan, 16 bits each.
        listed = _count_listed(left, position, n, bound)
        listed += _count_listed(right, position + TILE_N, n, bound) << 16
        before = tl.cumsum(listed, axis=0) - listed
        total = tl.sum(listed, axis=0)
        rank = seen + (before & 0xFFFF)
        _store_listed(left, position, n, bound, rank, short_positions, max_shortlist)
        rank = seen + (total & 0xFFFF) + (before >> 16)
        _store_listed(right, position + TILE_N, n, bound, rank, short_positions, max_shortlist)
        seen += (total & 0xFFFF) + (total >> 16)
    return seen


@triton.jit
def _gather_keys(row, short_positions, n, keys, BLOCK_N: tl.constexpr):
    """Store the keys at the shortlisted positions, padded to a whole tile."""
    lane = tl.arange(0, BLOCK_N)
    for start in range(0, n, BLOCK_N):
        index = start + lane
        position = tl.load(short_positions + index, mask=index < n, other=0)
        score = tl.load(row + position, mask=index < n, other=0.0)
        tl.store(keys + index, tl.where(index < n, _ordered_keys(score), -0x80000000))


@triton.jit
def _compact(
    source, n, low, high, above, count, short_positions, selected,
    BLOCK_N: tl.constexpr, IS_ROW: tl.constexpr, ALIGN: tl.constexpr = 1,
):  # fmt: skip
    """Store the positions of the keys above the range and of the first in it, up to count, in their order."""
    QUADS: tl.constexpr = BLOCK_N // 4
    lane = tl.arange(0, BLOCK_N)
    from_range = count - above
    above_seen = tl.full([], 0, tl.int32)
    range_seen = tl.full([], 0, tl.int32)
    for start in range(0, n, BLOCK_N):
        quad = _quads(_load_keys(source, start + lane, n, IS_ROW, ALIGN), QUADS)
        # Counts of the keys above the range and in it share one scan, 16 bits each.
        counts = tl.zeros([QUADS], tl.int32)
        for member in tl.static_range(4):
            counts += tl.where(quad[member] > high, 1 << 16, tl.where(quad[member] >= low, 1, 0))
        before = tl.cumsum(counts, axis=0) - counts
        total = tl.sum(counts, axis=0)
        above_before = above_seen + (before >> 16)
        range_before = range_seen + (before & 0xFFFF)
        for member in tl.static_range(4):
            is_above = quad[member] > high
            is_taken = (quad[member] >= low) & (range_before < from_range)
            position = start + 4 * tl.arange(0, QUADS) + member
            if not IS_ROW:
                position = tl.load(short_positions + position, mask=position < n, other=0)
            rank = above_before + tl.minimum(range_before, from_range)
            tl.store(selected + rank, position, mask=is_above | is_taken)
            above_before += is_above.to(tl.int32)
            range_before += ((quad[member] >= low) & (quad[member] <= high)).to(tl.int32)
        above_seen += total >> 16
        range_seen += total & 0xFFFF


@triton.jit
def _select_kernel(
    scores, num_candidates, num_select, req_pool_indices, positions, scratch_keys, scratch_positions,
    stride_score_batch, stride_score_head, stride_pos_slot, stride_pos_head, capacity, max_shortlist,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Shortlist the scores that can be selected, search the count-th highest of them, compact in order.

    The count-th highest of the maxima of disjoint groups is a lower bound of the count-th highest score:
    count scores, one a group, are not below it. While the groups outnumber the count, hardly more than count
    scores reach the bound. So the many passes of the two searches see an eighth of the row and the shortlist,
    and the row is read twice. Where it gives no bound (few candidates, a large share selected) all are
    shortlisted; only if the shortlist overflows does the search run on the row.
    """
    kv_head, batch = tl.program_id(0), tl.program_id(1)
    candidates = tl.load(num_candidates + batch).to(tl.int32)
    count = tl.minimum(tl.load(num_select + batch).to(tl.int32), tl.minimum(candidates, capacity))
    if count <= 0:
        return
    slot = tl.load(req_pool_indices + batch).to(tl.int64)
    row = scores + batch.to(tl.int64) * stride_score_batch + kv_head * stride_score_head
    selected = positions + slot * stride_pos_slot + kv_head * stride_pos_head
    pair = (batch * tl.num_programs(0) + kv_head).to(tl.int64)
    keys = scratch_keys + pair * max_shortlist
    short_positions = scratch_positions + pair * max_shortlist

    bound = tl.full([], float("-inf"), tl.float32)
    low = tl.full([], -0x7F800001, tl.int32)  # the keys of -inf and inf
    high = tl.full([], 0x7F800000, tl.int32)
    num_groups = tl.cdiv(tl.cdiv(candidates, GROUP), 4) * 4
    # Only the last member of a group may be missing, and the maxima must fit.
    groups_fit = ((GROUP - 1) * num_groups <= candidates) & (num_groups <= max_shortlist)
    if (candidates > BLOCK_N) & (count < num_groups) & groups_fit:
        lowest, high = _group_maxima(row, candidates, num_groups, keys, BLOCK_N, GROUP, ALIGN)
        tl.debug_barrier()
        low, _, _ = _search(keys, num_groups, lowest, high, count, count + count // 8, BLOCK_N, IS_ROW=False)
        bound = _flip_below_zero(low).to(tl.float32, bitcast=True)
    short = _make_shortlist(row, candidates, bound, short_positions, max_shortlist, 2 * BLOCK_N, ALIGN)
    tl.debug_barrier()
    if short <= max_shortlist - 4:
        _gather_keys(row, short_positions, short, keys, BLOCK_N)
        tl.debug_barrier()
        low, high, above = _search(keys, short, low, high, count, count, BLOCK_N, IS_ROW=False)
        _compact(keys, short, low, high, above, count, short_positions, selected, BLOCK_N, IS_ROW=False)
    else:
        low, high, above = _search(row, candidates, low, high, count, count, BLOCK_N, True, ALIGN)
        _compact(row, candidates, low, high, above, count, short_positions, selected, BLOCK_N, True, ALIGN)
