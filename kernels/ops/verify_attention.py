"""Verify attention: dense causal attention of a draft block, and refresh scores from one pass over K."""

import math

import torch
import triton
import triton.language as tl
from s3r_sglang.kernels.ops import _checks, _launch

LOG2_E = math.log2(math.e)
OP = "verify_attention"
MAX_ROWS = 128  # query rows of a KV head: they stay on chip as one tile
# By how many powers of two a weight may exceed 1 before sums are rescaled; float16 holds 2**16.
MAX_AHEAD = tl.constexpr(8.0)
MAX_SPLITS = 64


def verify_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    lse_estimate: torch.Tensor | None = None,
    num_candidates: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend densely and causally from each request's last Q positions, and optionally score its positions.

    Query i of request b stands at position seq_lens[b] - Q + i and attends to all positions up to its own.
    Softmax and sums are in float32.

    With `scores`, for pos < num_candidates[b], scores[b, h, pos] becomes the mean over the counted rows (the
    queries and heads of KV head h with lse_estimate > -inf) of exp(scale · q·k - lse_estimate), 0 for rows
    that stand before pos. With the exact log-sum-exp this is `attention_scores`, which needs the softmax
    denominator before it sees the first key; an estimate saves the second pass over K. The error of
    an estimate scales all weights of its row alike: it changes the share of the row in the mean, not the
    order of positions within the row.

    Args:
        q: [B, Q, Hq, D] float32, float16 or bfloat16; D a multiple of 16.
        k_cache, v_cache: [pool, Hkv, D], dtype of q, Hkv dividing Hq; rows may be strided.
        req_to_token: [slots, W] int32, pool row of (slot, position).
        req_pool_indices: [B] integer, slot of each request.
        seq_lens: [B] integer, positions including those of the queries. Queries at negative positions
            (padding rows have seq_len 0) get 0.
        scale: factor of q·k.
        lse_estimate: [B, Q, Hq] float32, estimate of ln Σ exp(scale · q·k) of each row.
        num_candidates: [B] integer, at most min(S, seq_lens[b]).
        scores: [B, Hkv, S] float32; entries from num_candidates[b] on are left as they are.
        out: [B, Q, Hq, D] of q's dtype, allocated if None.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit; Q · Hq / Hkv exceeds 128; or `scores`,
            `lse_estimate` and `num_candidates` are not all given or all None.
        RuntimeError: the tensors are on the CPU and Triton's interpreter is off.

    Safe in a CUDA graph: the grid depends on shapes only.
    """
    out = torch.empty_like(q) if out is None else out
    batch_size, queries, num_heads, _ = q.shape
    _checks.check_device(
        OP, q, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, lse_estimate, num_candidates,
        scores, out,
    )  # fmt: skip
    _checks.check_cache(OP, q, k_cache, v_cache)
    _checks.check_requests(OP, batch_size, req_to_token, req_pool_indices=req_pool_indices, seq_lens=seq_lens)
    _checks.check_output(OP, "out", out, tuple(q.shape), q.dtype)
    rows = queries * num_heads // k_cache.shape[1]
    _checks.require(
        rows <= MAX_ROWS, f"{OP}: Q · Hq / Hkv = {rows} rows do not fit one tile, at most {MAX_ROWS}"
    )
    if lse_estimate is not None and num_candidates is not None and scores is not None:
        _checks.check_output(
            OP, "lse_estimate", lse_estimate, (batch_size, queries, num_heads), torch.float32
        )
        _checks.check_vectors(OP, batch_size, num_candidates=num_candidates)
        shape = (batch_size, k_cache.shape[1], scores.shape[-1])
        _checks.check_output(OP, "scores", scores, shape, torch.float32)
    else:
        _checks.require(
            lse_estimate is None and num_candidates is None and scores is None,
            f"{OP}: lse_estimate, num_candidates and scores go together",
        )
    _launch_kernels(
        q, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, scale, lse_estimate, num_candidates,
        scores, out,
    )  # fmt: skip
    return out


def _launch_kernels(
    q, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, scale, lse_estimate, num_candidates,
    scores, out, block_n=None, num_splits=None, num_warps=None, num_stages=None,
):  # fmt: skip
    """Launch with explicit tile choices; the bench sweeps them."""
    batch_size, queries, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    if q.numel() == 0:
        return
    block_m, block_d = _launch.block_of(queries * group), _launch.block_of(head_dim)
    if block_n is None:
        block_n = 128 // q.element_size()  # float32 tiles of 64 positions would spill
    if num_warps is None:
        # Measured on an H200 at 64 x 8K: 527 us (4 warps: 557) for 28 rows, 172 us (8 warps: 281) for 42.
        num_warps = 4 if block_m == 64 and block_d <= 128 else 8
    if num_stages is None:
        num_stages = _num_stages(q, block_m, block_n, block_d)
    if num_splits is None:
        max_splits = min(MAX_SPLITS, triton.cdiv(req_to_token.shape[1], block_n))
        pairs = batch_size * num_kv_heads
        programs_per_sm = 2 if block_m <= 64 else 1  # what registers and shared memory allow on Hopper
        num_splits = _launch.even_splits(q.device, pairs, programs_per_sm, max_splits)
    partial_out = partial_lse = None
    if num_splits > 1:
        shape = (batch_size, queries, num_heads, num_splits)
        partial_out = q.new_empty((*shape, head_dim), dtype=torch.float32)
        partial_lse = q.new_empty(shape, dtype=torch.float32)
    score_strides = (0, 0, 0, 0)
    if scores is not None:
        score_strides = (*lse_estimate.stride()[:2], *scores.stride()[:2])
    # KV heads vary fastest: the heads of a position are neighbours in memory, and so in time. The number of
    # splits is that of the programs, no constant: the batch buckets of CUDA graphs share compiled kernels.
    _verify_kernel[(num_kv_heads, num_splits, batch_size)](
        q, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, lse_estimate, num_candidates, scores,
        out, partial_out, partial_lse, scale * LOG2_E,
        q.stride(0), q.stride(1), q.stride(2), k_cache.stride(0), k_cache.stride(1),
        v_cache.stride(0), v_cache.stride(1), req_to_token.stride(0), *score_strides,
        out.stride(0), out.stride(1), out.stride(2),
        GROUP=group, QUERIES=queries, HEAD_DIM=head_dim, BLOCK_D=block_d,
        BLOCK_M=block_m, BLOCK_N=block_n, IS_SPLIT=num_splits > 1,
        DOT_PRECISION=_launch.dot_precision(q.dtype), LOG2_E=LOG2_E, POSITIONS_FIRST=block_m <= 32,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if num_splits > 1:
        _combine_kernel[(num_heads, queries, batch_size)](
            partial_out, partial_lse, out, out.stride(0), out.stride(1), out.stride(2),
            num_splits, HEAD_DIM=head_dim, BLOCK_D=block_d,
            BLOCK_SPLITS=8 if num_splits <= 8 else MAX_SPLITS, num_warps=1 if num_splits <= 8 else 4,
        )  # fmt: skip


def _num_stages(q: torch.Tensor, block_m: int, block_n: int, block_d: int) -> int:
    """Tiles of K and V in flight: three, or two where shared memory is short (compute capability 8.6, 8.9)."""
    tile = 2 * block_n * block_d * q.element_size()
    # The queries and one tile of weights; float32 ones are held twice, split into TF32 parts.
    rest = block_m * (block_d + block_n) * q.element_size() * (2 if q.dtype == torch.float32 else 1)
    return 3 if 3 * tile + rest <= _launch.shared_memory(q.device) else 2


@triton.jit
def _load_rows(rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dim = tl.arange(0, BLOCK_D)[None, :]
    if HEAD_DIM == BLOCK_D:
        return tl.load(rows + dim)
    return tl.load(rows + dim, mask=dim < HEAD_DIM, other=0.0)


@triton.jit
def _store_rows(
    rows, lse, out, partial_out, partial_lse, batch, query, head, num_heads, split, num_splits,
    stride_out_batch, stride_out_query, stride_out_head,
    QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Store a result [BLOCK_M, BLOCK_D], or that of a split with its (base 2) log-sum-exp."""
    dim = tl.arange(0, BLOCK_D)
    mask = (query < QUERIES)[:, None] & (dim < HEAD_DIM)[None, :]
    if IS_SPLIT:
        part = ((batch * QUERIES + query).to(tl.int64) * num_heads + head) * num_splits + split
        tl.store(partial_out + part[:, None] * HEAD_DIM + dim[None, :], rows, mask=mask)
        tl.store(partial_lse + part, lse, mask=query < QUERIES)
    else:
        row = batch.to(tl.int64) * stride_out_batch + query * stride_out_query + head * stride_out_head
        tl.store(out + row[:, None] + dim[None, :], rows, mask=mask)


@triton.jit
def _verify_kernel(
    q, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, lse_estimate, num_candidates, scores,
    out, partial_out, partial_lse, scale_log2,
    stride_q_batch, stride_q_query, stride_q_head, stride_k_row, stride_k_head, stride_v_row, stride_v_head,
    stride_token_slot, stride_lse_batch, stride_lse_query, stride_score_batch, stride_score_head,
    stride_out_batch, stride_out_query, stride_out_head,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_SPLIT: tl.constexpr,
    DOT_PRECISION: tl.constexpr, LOG2_E: tl.constexpr, POSITIONS_FIRST: tl.constexpr,
):  # fmt: skip
    """One split of one KV head: all queries and heads of its group are the rows of one tile.

    POSITIONS_FIRST makes positions the rows of both products, K q^T and V^T p: a tensor core instruction of
    Hopper takes 64 rows, half of which 28 queries would leave empty.
    """
    QUERY_AXIS: tl.constexpr = 1 if POSITIONS_FIRST else 0
    POSITION_AXIS: tl.constexpr = 1 - QUERY_AXIS
    kv_head, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads, num_splits = tl.num_programs(0) * GROUP, tl.num_programs(1)
    slot = tl.load(req_pool_indices + batch).to(tl.int64)
    seq_len = tl.load(seq_lens + batch).to(tl.int32)
    token_rows = req_to_token + slot * stride_token_slot
    per_split = tl.cdiv(tl.cdiv(seq_len, num_splits), BLOCK_N) * BLOCK_N
    begin = split * per_split
    end = tl.minimum(begin + per_split, seq_len)

    lane = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    row = tl.arange(0, BLOCK_M)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    if begin >= end:
        # Besides padding and splits of a short context this serves the compiler: of a loop that might not
        # run at all, ptxas serialises the tensor core instructions (C7515).
        _store_rows(
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32),
            out, partial_out, partial_lse, batch, query, head, num_heads, split, num_splits,
            stride_out_batch, stride_out_query, stride_out_head, QUERIES, HEAD_DIM, BLOCK_D, IS_SPLIT,
        )  # fmt: skip
        return
    q_mask = (query < QUERIES)[:, None] & (dim < HEAD_DIM)[None, :]
    q_tile = tl.load(
        q + batch.to(tl.int64) * stride_q_batch
        + (query * stride_q_query + head * stride_q_head)[:, None] + dim[None, :],
        mask=q_mask,
        other=0.0,
    )  # fmt: skip
    query_position = seq_len - QUERIES + query
    if scores is not None:
        candidates = tl.load(num_candidates + batch).to(tl.int32)
        score_row = scores + batch.to(tl.int64) * stride_score_batch + kv_head * stride_score_head
        row_lse = tl.load(
            lse_estimate + batch * stride_lse_batch + query * stride_lse_query + head,
            mask=query < QUERIES,
            other=float("-inf"),
        )
        row_counts = row_lse > float("-inf")
        share = tl.where(row_counts, 1.0, 0.0)
        share = share / tl.maximum(tl.sum(share, axis=0), 1.0)
        row_lse = tl.where(row_counts, row_lse * LOG2_E, 0.0)

    shift = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, as -inf - -inf is not a number
    to_mean = tl.zeros([BLOCK_M], tl.float32)
    # By lane, so that threads exchange them once, at the end.
    sums = tl.zeros([BLOCK_N, BLOCK_M] if POSITIONS_FIRST else [BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_M] if POSITIONS_FIRST else [BLOCK_M, BLOCK_D], tl.float32)
    k_head = k_cache + kv_head * stride_k_head
    v_head = v_cache + kv_head * stride_v_head
    last = end - 1  # lanes beyond the end read its row: no masks, and no foreign values
    pool_rows = tl.load(token_rows + tl.minimum(begin + lane, last))
    for start in range(begin, end, BLOCK_N):
        position = start + lane
        wide_rows = pool_rows.to(tl.int64)[:, None]
        k = _load_rows(k_head + wide_rows * stride_k_row, HEAD_DIM, BLOCK_D)
        v = _load_rows(v_head + wide_rows * stride_v_row, HEAD_DIM, BLOCK_D)
        # The next tile's row numbers arrive under this tile's arithmetic.
        pool_rows = tl.load(token_rows + tl.minimum(position + BLOCK_N, last))

        if POSITIONS_FIRST:
            logits = tl.dot(k, tl.trans(q_tile), input_precision=DOT_PRECISION) * scale_log2
        else:
            logits = tl.dot(q_tile, tl.trans(k), input_precision=DOT_PRECISION) * scale_log2
        if start + BLOCK_N > tl.minimum(end, seq_len - QUERIES + 1):  # else every query sees all of it
            last_seen = tl.expand_dims(tl.minimum(query_position, end - 1), POSITION_AXIS)
            logits = tl.where(tl.expand_dims(position, QUERY_AXIS) <= last_seen, logits, float("-inf"))
        # The shift only keeps exp2 in range: it follows the maximum once that is 2**8 ahead (Shah et al.,
        # FlashAttention-4), so hardly ever after the first tile, and one number a tile is reduced for it.
        if tl.max(logits - tl.expand_dims(shift, POSITION_AXIS)) > MAX_AHEAD:
            new_shift = tl.maximum(shift, tl.max(logits, axis=POSITION_AXIS))
            rescale = tl.expand_dims(tl.exp2(shift - new_shift), POSITION_AXIS)
            sums = sums * rescale
            acc = acc * rescale
            shift = new_shift
            if scores is not None:
                # exp(logit - lse) from the weights at hand: one factor a row instead of an exp an element.
                # The bound keeps inf and 0 · inf away should an estimate be absurdly low.
                to_mean = share * tl.exp2(tl.minimum(shift - row_lse, 100.0))
        weights = tl.exp2(logits - tl.expand_dims(shift, POSITION_AXIS))
        sums += weights
        if POSITIONS_FIRST:
            acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc, input_precision=DOT_PRECISION)
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=DOT_PRECISION)
        if scores is not None:
            mean_weight = tl.sum(weights * tl.expand_dims(to_mean, POSITION_AXIS), axis=QUERY_AXIS)
            tl.store(score_row + position, mean_weight, mask=position < tl.minimum(end, candidates))

    running_sum = tl.sum(sums, axis=POSITION_AXIS)
    if POSITIONS_FIRST:
        acc = tl.trans(acc)
    acc = tl.where((running_sum > 0)[:, None], acc / running_sum[:, None], 0.0)
    _store_rows(
        acc, shift + tl.log2(running_sum), out, partial_out, partial_lse, batch, query, head, num_heads,
        split, num_splits, stride_out_batch, stride_out_query, stride_out_head,
        QUERIES, HEAD_DIM, BLOCK_D, IS_SPLIT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    partial_out, partial_lse, out, stride_out_batch, stride_out_query, stride_out_head, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row by their (base 2) log-sum-exp."""
    head, query, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (batch * tl.num_programs(1) + query).to(tl.int64) * tl.num_programs(0) + head
    split = tl.arange(0, BLOCK_SPLITS)
    dim = tl.arange(0, BLOCK_D)
    part = row * num_splits + split
    lse = tl.load(partial_lse + part, mask=split < num_splits, other=float("-inf"))
    mask = (split < num_splits)[:, None] & (dim < HEAD_DIM)[None, :]
    parts = tl.load(partial_out + part[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    largest = tl.max(lse, axis=0)
    share = tl.exp2(lse - tl.where(largest > float("-inf"), largest, 0.0))
    total = tl.sum(share, axis=0)
    merged = tl.sum(parts * share[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    out_row = out + batch.to(tl.int64) * stride_out_batch + query * stride_out_query + head * stride_out_head
    tl.store(out_row + dim, merged, mask=dim < HEAD_DIM)
