"""Sparse decode attention: one query per request over its index and tail (arXiv 2610.13202, section 3.2)."""

import math

import torch
import triton
import triton.language as tl
from s3r_sglang.kernels.ops import _checks, _launch
from triton.language.extra.cuda import gdc

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
OP = "sparse_decode_attention"
MAX_SPLITS = 16


def sparse_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    num_selected: torch.Tensor,
    tail_start: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    new_k: torch.Tensor | None = None,
    new_v: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each request's newest token to its selected positions and its tail.

    Request b of slot s = req_pool_indices[b] attends, in KV head h, to the positions
    `positions[s, h, :num_selected[s]]` and `tail_start[s] .. seq_lens[b] - 1`, two disjoint sets. No other
    cache row and no other entry of `positions` is used. Softmax and sums are in float32.

    Args:
        q: [B, Hq, D] float32, float16 or bfloat16; D a multiple of 16.
        k_cache, v_cache: [pool, Hkv, D], dtype of q, Hkv dividing Hq; rows may be strided.
        req_to_token: [slots, W] int32, pool row of (slot, position).
        req_pool_indices: [B] integer, slot of each request.
        seq_lens: [B] integer, positions including the query's own; 0 marks a padding row.
        positions: [slots, Hkv, M] int32.
        num_selected, tail_start: [slots] int32.
        scale: factor of q·k.
        out: [B, Hq, D] of q's dtype, allocated if None. Padding rows get 0.
        lse: [B, Hq] float32; if given, receives ln Σ exp(scale · q·k), -inf in padding rows.
        new_k, new_v: [B, Hkv, D] of q's dtype, K and V of the newest tokens, which must be in their tails. If
            given they are stored to the caches at position seq_lens[b] - 1; without them they are there already.
            The store alone would be a launch per layer, 2.6 us behind this kernel at 64 x 8K on an H200.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit, or only one of new_k and new_v is given.
        RuntimeError: the tensors are on the CPU and Triton's interpreter is off.

    Safe in a CUDA graph once it has run eagerly on the device: the grid depends on shapes only.

    From Hopper on it starts while the kernel in front of it ends, and looks its rows up meanwhile. Kernels in
    front may write q, new_k, new_v and the caches; the request table, the lengths and the index must have been
    written before the last kernel that itself started only when all before it had ended.
    """
    out = torch.empty_like(q) if out is None else out
    batch_size, num_heads = q.shape[:2]
    num_slots, num_kv_heads = req_to_token.shape[0], k_cache.shape[1]
    _checks.check_device(
        OP, q, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, positions, out, lse, new_k, new_v
    )
    _checks.check_cache(OP, q, k_cache, v_cache)
    _checks.check_requests(OP, batch_size, req_to_token, req_pool_indices=req_pool_indices, seq_lens=seq_lens)
    _checks.check_vectors(OP, num_slots, num_selected=num_selected, tail_start=tail_start)
    _checks.check_output(
        OP, "positions", positions, (num_slots, num_kv_heads, positions.shape[-1]), torch.int32
    )
    _checks.check_output(OP, "out", out, tuple(q.shape), q.dtype)
    if lse is not None:
        _checks.check_output(OP, "lse", lse, (batch_size, num_heads), torch.float32)
    _checks.require((new_k is None) == (new_v is None), f"{OP}: new_k and new_v go together")
    if new_k is not None:
        shape = (batch_size, num_kv_heads, q.shape[2])
        _checks.check_output(OP, "new_k", new_k, shape, q.dtype)
        _checks.check_output(OP, "new_v", new_v, shape, q.dtype)
    _launch_kernel(
        q, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, positions, num_selected, tail_start,
        scale, out, lse, new_k, new_v,
    )  # fmt: skip
    return out


def _launch_kernel(
    q, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, positions, num_selected, tail_start,
    scale, out, lse, new_k=None, new_v=None, block_n=32, num_splits=None, num_warps=None, num_stages=3,
):  # fmt: skip
    """Launch with explicit tile choices; the bench sweeps them."""
    batch_size, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    pairs = batch_size * num_kv_heads
    if pairs == 0:
        return
    if num_splits is None:
        # Each split should keep a tile of work; the tail adds to M but is short when M is worth splitting.
        max_splits = min(MAX_SPLITS, triton.cdiv(positions.shape[2], block_n))
        num_splits = _launch.num_splits(q.device, pairs, programs_per_sm=4, max_splits=max_splits)
    if num_warps is None:
        # One warp needs no barriers; larger rows would spill.
        num_warps = 1 if head_dim * q.element_size() <= 256 else 4
    early = _launch.starts_early(q.device)
    partial_out = partial_lse = arrivals = None
    if num_splits > 1:
        partial_out = q.new_empty((pairs, num_splits, group, head_dim), dtype=torch.float32)
        partial_lse = q.new_empty((pairs, num_splits, group), dtype=torch.float32)
        arrivals = _launch.arrival_counters(q.device)
    # KV heads vary fastest: the heads of a position are neighbours in memory, and so in time.
    _sparse_decode_kernel[(num_kv_heads, num_splits, batch_size)](
        q, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, positions, num_selected, tail_start,
        new_k, new_v, out, lse, partial_out, partial_lse, arrivals,
        scale * LOG2_E,
        q.stride(0), q.stride(1), k_cache.stride(1), v_cache.stride(1),
        req_to_token.stride(0), positions.stride(0), positions.stride(1), positions.shape[2],
        *(new_k.stride()[:2] if new_k is not None else (0, 0)),
        *(new_v.stride()[:2] if new_v is not None else (0, 0)),
        out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0),
        K_ROW=k_cache.stride(0), V_ROW=v_cache.stride(0),
        GROUP=group, BLOCK_G=_launch.block_of(group), HEAD_DIM=head_dim, BLOCK_D=_launch.block_of(head_dim),
        BLOCK_N=block_n, IS_SPLIT=num_splits > 1, BLOCK_SPLITS=MAX_SPLITS,
        DOT_PRECISION=_launch.dot_precision(q.dtype), LN_2=LN_2, EARLY=early,
        # Left to itself ptxas stops at 168 registers of a one-warp program and loads operands one product ahead.
        num_warps=num_warps, num_stages=num_stages, maxnreg=255 if num_warps == 1 else None,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


@triton.jit
def _index_entries(selected, index, width):
    """Entries of the index, read before the kernel knows how many there are; those beyond go unused."""
    return tl.load(selected + index, mask=index < width, other=0, eviction_policy="evict_last")


@triton.jit
def _pool_rows(token_rows, entries, index, end, num_selected, tail_start, spare):
    """Pool rows of places `index` of the attended list: the selected positions first, then the tail.

    Places beyond the end have the row of position `spare`, one that is attended to: no lane of a tile needs a
    mask, and none reads a foreign row. It is -1 if there is no place at all.
    """
    position = tl.where(index < num_selected, entries, tail_start + index - num_selected)
    position = tl.where(index < end, position, spare)
    return tl.load(token_rows + position, mask=position >= 0, other=0, eviction_policy="evict_last")


@triton.jit
def _load_tile(row_zero, rows, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of K or V. With a constant stride an address is one multiply-add, else seven instructions."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    pointers = row_zero + dim + rows.to(tl.int64)[:, None] * STRIDE
    if HEAD_DIM == BLOCK_D:
        return tl.load(pointers)
    return tl.load(pointers, mask=dim < HEAD_DIM, other=0.0)


@triton.jit
def _sparse_decode_kernel(
    q, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, positions, num_selected, tail_start,
    new_k, new_v, out, lse, partial_out, partial_lse, arrivals,
    scale_log2,
    stride_q_batch, stride_q_head, stride_k_head, stride_v_head,
    stride_token_slot, stride_pos_slot, stride_pos_head, width,
    stride_new_k_batch, stride_new_k_head, stride_new_v_batch, stride_new_v_head,
    stride_out_batch, stride_out_head, stride_lse_batch,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_SPLIT: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    DOT_PRECISION: tl.constexpr, LN_2: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    kv_head, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads, num_splits = tl.num_programs(0), tl.num_programs(1)
    slot = tl.load(req_pool_indices + batch).to(tl.int64)
    seq_len = tl.load(seq_lens + batch).to(tl.int32)
    selected_count = tl.load(num_selected + slot).to(tl.int32)
    tail = tl.load(tail_start + slot).to(tl.int32)
    token_rows = req_to_token + slot * stride_token_slot
    selected = positions + slot * stride_pos_slot + kv_head * stride_pos_head

    # A newest token that comes as an argument is not read from the cache.
    cached_len = seq_len if new_k is None else seq_len - 1
    attended = selected_count + tl.maximum(cached_len - tail, 0)
    attended = tl.where(seq_len > 0, attended, 0)
    # Whole tiles per split: splits of a short list stay empty rather than all running a partial tile.
    per_split = tl.cdiv(tl.cdiv(attended, num_splits), BLOCK_N) * BLOCK_N
    # A single split begins to read the index before it knows the length.
    begin = split * per_split if IS_SPLIT else 0
    end = tl.minimum(begin + per_split, attended)

    group = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_N)
    # The index loads depend on each other, and queue behind K and V in flight: rows are requested two tiles
    # ahead of their copies, entries three.
    first = tl.load(selected + begin, mask=begin < width, other=0)
    spare = tl.where(begin < selected_count, first, tail + begin - selected_count)
    spare = tl.where(begin < end, spare, -1)
    entries = _index_entries(selected, begin + lane, width)
    next_entries = _index_entries(selected, begin + BLOCK_N + lane, width)
    rows = _pool_rows(token_rows, entries, begin + lane, end, selected_count, tail, spare)
    next_rows = _pool_rows(token_rows, next_entries, begin + BLOCK_N + lane, end, selected_count, tail, spare)
    entries = _index_entries(selected, begin + 2 * BLOCK_N + lane, width)
    if EARLY:
        # 64 x 8K on an H200: 32.0 us without, 31.6 with, 30.8 where the next kernel starts early too.
        gdc.gdc_wait()

    heads = kv_head * GROUP + group
    q_mask = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_tile = tl.load(
        q + batch.to(tl.int64) * stride_q_batch + heads[:, None] * stride_q_head + dim[None, :],
        mask=q_mask,
        other=0.0,
    )
    k_head = k_cache + kv_head * stride_k_head
    v_head = v_cache + kv_head * stride_v_head
    if new_k is not None:
        # Requested here, stored and attended to behind the loop: a store would hold up the loads behind it.
        is_first = (seq_len > 0) & (split == 0)
        new_mask = (dim < HEAD_DIM) & is_first
        k_source = new_k + batch.to(tl.int64) * stride_new_k_batch + kv_head * stride_new_k_head
        v_source = new_v + batch.to(tl.int64) * stride_new_v_batch + kv_head * stride_new_v_head
        k_newest = tl.load(k_source + dim, mask=new_mask, other=0.0)
        v_newest = tl.load(v_source + dim, mask=new_mask, other=0.0)
        new_row = tl.load(token_rows + cached_len, mask=is_first, other=0).to(tl.int64)

    running_max = tl.full([BLOCK_G], -1e30, tl.float32)  # finite, as -inf - -inf is not a number
    running_sum = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        k = _load_tile(k_head, rows, K_ROW, HEAD_DIM, BLOCK_D)
        v = _load_tile(v_head, rows, V_ROW, HEAD_DIM, BLOCK_D)
        ahead = start + 2 * BLOCK_N + lane
        # No row is negative. Triton pipelines no loop that hands a value on from one iteration to the one after
        # the next; the maximum makes it a new value.
        rows = tl.maximum(next_rows, 0)
        next_rows = _pool_rows(token_rows, entries, ahead, end, selected_count, tail, spare)
        entries = _index_entries(selected, ahead + BLOCK_N, width)

        logits = tl.dot(q_tile, tl.trans(k), input_precision=DOT_PRECISION) * scale_log2
        logits = tl.where((start + lane < end)[None, :], logits, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=DOT_PRECISION)
        running_max = new_max

    if EARLY and not IS_SPLIT:
        # Only now: programs that wait would take the places of this launch's own. Splits have yet to be merged.
        gdc.gdc_launch_dependents()
    if new_k is not None:
        logit = tl.sum(q_tile.to(tl.float32) * k_newest.to(tl.float32)[None, :], axis=1) * scale_log2
        logit = tl.where(is_first, logit, float("-inf"))
        new_max = tl.maximum(running_max, logit)
        weight = tl.exp2(logit - new_max)
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + weight
        acc = acc * rescale[:, None] + weight[:, None] * v_newest.to(tl.float32)[None, :]
        running_max = new_max
        tl.store(k_head + new_row * K_ROW + dim, k_newest, mask=new_mask)
        tl.store(v_head + new_row * V_ROW + dim, v_newest, mask=new_mask)
    acc = tl.where((running_sum > 0)[:, None], acc / running_sum[:, None], 0.0)
    lse_log2 = running_max + tl.log2(running_sum)  # -inf for an empty split
    out_row = out + batch.to(tl.int64) * stride_out_batch
    if not IS_SPLIT:
        tl.store(out_row + heads[:, None] * stride_out_head + dim[None, :], acc, mask=q_mask)
        if lse is not None:
            tl.store(lse + batch * stride_lse_batch + heads, lse_log2 * LN_2, mask=group < GROUP)
    else:
        pair = batch * num_kv_heads + kv_head
        part = (pair * num_splits + split) * GROUP + group
        tl.store(partial_out + part.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :], acc, mask=q_mask)
        tl.store(partial_lse + part, lse_log2, mask=group < GROUP)
        # All threads' stores come before the arrival, and the last arrival sees all partial results.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == num_splits - 1:
            tl.store(arrivals + pair, 0)
            splits = tl.arange(0, BLOCK_SPLITS)
            for g in tl.static_range(GROUP):
                source = (pair * num_splits + splits) * GROUP + g
                split_lse = tl.load(
                    partial_lse + source,
                    mask=splits < num_splits,
                    other=float("-inf"),
                    cache_modifier=".cg",
                )
                split_out = tl.load(
                    partial_out + source.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :],
                    mask=(splits < num_splits)[:, None] & (dim < HEAD_DIM)[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                largest = tl.max(split_lse, axis=0)
                share = tl.exp2(split_lse - tl.where(largest > float("-inf"), largest, 0.0))
                total = tl.sum(share, axis=0)
                merged = tl.sum(split_out * share[:, None], axis=0) / tl.where(total > 0, total, 1.0)
                head = kv_head * GROUP + g
                tl.store(out_row + head * stride_out_head + dim, merged, mask=dim < HEAD_DIM)
                if lse is not None:
                    tl.store(lse + batch * stride_lse_batch + head, (largest + tl.log2(total)) * LN_2)
