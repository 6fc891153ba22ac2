"""Refresh scores: the mean dense attention weight of each position (arXiv 2610.13202, equation 4)."""

import math

import torch
import triton
import triton.language as tl
from s3r_sglang.kernels.ops import _checks, _launch

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
OP = "attention_scores"


def attention_scores(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    num_queries: torch.Tensor,
    num_candidates: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Average the normalised causal attention weights over a request's last queries and a head's group.

    Query i of request b stands at position seq_lens[b] - Q + i and counts iff i >= Q - num_queries[b]. Its
    weights are a softmax over all positions up to its own, in float32. For pos < num_candidates[b],
    out[b, h, pos] is the mean weight of pos over the counted queries and the query heads of KV head h; a
    query that stands before pos contributes 0. Other entries of `out` are left as they are.

    Args:
        q: [B, Q, Hq, D] float32, float16 or bfloat16; D a multiple of 16.
        k_cache: [pool, Hkv, D], dtype of q, Hkv dividing Hq; rows may be strided.
        req_to_token: [slots, W] int32, pool row of (slot, position).
        req_pool_indices: [B] integer, slot of each request.
        seq_lens: [B] integer, positions including those of the queries; 0 marks a padding row.
        num_queries: [B] integer, counted queries, at most min(Q, seq_lens[b]).
        num_candidates: [B] integer, at most min(S, seq_lens[b]).
        scale: factor of q·k.
        out: [B, Hkv, S] float32.
        lse: [B, Q, Hq] float32 of any strides, ln Σ exp(scale · q·k) of each query if the forward kept it;
            it saves the first of two passes over K. Entries of queries that do not count are not read.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
        RuntimeError: the tensors are on the CPU and Triton's interpreter is off.

    Safe in a CUDA graph: the grid depends on shapes only.
    """
    batch_size, queries, num_heads, _ = q.shape
    _checks.check_device(
        OP, q, k_cache, req_to_token, req_pool_indices, seq_lens, num_queries, num_candidates, out, lse
    )
    _checks.check_cache(OP, q, k_cache)
    _checks.check_requests(
        OP, batch_size, req_to_token, req_pool_indices=req_pool_indices, seq_lens=seq_lens,
        num_queries=num_queries, num_candidates=num_candidates,
    )  # fmt: skip
    _checks.check_output(OP, "out", out, (batch_size, k_cache.shape[1], out.shape[-1]), torch.float32)
    if lse is not None:
        shape = (batch_size, queries, num_heads)
        _checks.require(
            lse.shape == shape and lse.dtype == torch.float32, f"{OP}: lse must be float32 {shape}"
        )
    _launch_kernels(
        q, k_cache, req_to_token, req_pool_indices, seq_lens, num_queries, num_candidates, scale, out, lse
    )
    return out


def _launch_kernels(
    q, k_cache, req_to_token, req_pool_indices, seq_lens, num_queries, num_candidates, scale, out, lse,
    block_n=64, num_splits=None, num_warps=4, num_stages=3,
):  # fmt: skip
    """Launch with explicit tile choices; the bench sweeps them."""
    batch_size, queries, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    if q.numel() == 0:
        return
    if num_splits is None:
        max_splits = min(64, triton.cdiv(req_to_token.shape[1], block_n))
        num_splits = _launch.num_splits(
            q.device, batch_size * num_kv_heads, programs_per_sm=8, max_splits=max_splits
        )
    # 64 rows keep the logits of a tile in registers beside the queries.
    block_m = min(64, _launch.block_of(queries * group))
    row_blocks = triton.cdiv(queries * group, block_m)
    common = {
        "GROUP": group, "QUERIES": queries, "HEAD_DIM": head_dim, "BLOCK_D": _launch.block_of(head_dim),
        "BLOCK_M": block_m, "BLOCK_N": block_n, "DOT_PRECISION": _launch.dot_precision(q.dtype),
        "num_warps": num_warps, "num_stages": num_stages,
    }  # fmt: skip
    requests = (req_to_token, req_pool_indices, seq_lens, num_queries)
    strides = (
        q.stride(0), q.stride(1), q.stride(2), k_cache.stride(0), k_cache.stride(1), req_to_token.stride(0),
    )  # fmt: skip
    if lse is None:
        split_lse = q.new_empty((num_splits, batch_size, queries, num_heads), dtype=torch.float32)
        _lse_kernel[(num_kv_heads * row_blocks, num_splits, batch_size)](
            q, k_cache, *requests, split_lse, scale * LOG2_E, *strides, split_lse.stride(0),
            ROW_BLOCKS=row_blocks, LN_2=LN_2, **common,
        )  # fmt: skip
        lse = split_lse[0] if num_splits == 1 else split_lse.logsumexp(dim=0)
    _scores_kernel[(num_kv_heads, num_splits, batch_size)](
        q, k_cache, *requests, num_candidates, lse, out, scale * LOG2_E, *strides,
        *lse.stride(), out.stride(0), out.stride(1),
        ROW_BLOCKS=row_blocks, LOG2_E=LOG2_E, **common,
    )  # fmt: skip


@triton.jit
def _lse_kernel(
    q, k_cache, req_to_token, req_pool_indices, seq_lens, num_queries, split_lse, scale_log2,
    stride_q_batch, stride_q_query, stride_q_head, stride_k_row, stride_k_head, stride_token_slot,
    stride_split,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    DOT_PRECISION: tl.constexpr, LN_2: tl.constexpr,
):  # fmt: skip
    """Pass 1: log-sum-exp of a block of query rows over one split of the positions."""
    kv_head, row_block = tl.program_id(0) // ROW_BLOCKS, tl.program_id(0) % ROW_BLOCKS
    split, batch = tl.program_id(1), tl.program_id(2)
    slot = tl.load(req_pool_indices + batch).to(tl.int64)
    seq_len = tl.load(seq_lens + batch).to(tl.int32)
    counted = tl.load(num_queries + batch).to(tl.int32)
    token_rows = req_to_token + slot * stride_token_slot
    per_split = tl.cdiv(tl.cdiv(seq_len, tl.num_programs(1)), BLOCK_N) * BLOCK_N
    begin = split * per_split
    end = tl.minimum(begin + per_split, seq_len)

    lane = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_counts = (query < QUERIES) & (query >= QUERIES - counted)
    q_tile = tl.load(
        q + batch.to(tl.int64) * stride_q_batch
        + (query * stride_q_query + head * stride_q_head)[:, None] + dim[None, :],
        mask=row_counts[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )  # fmt: skip
    query_position = seq_len - QUERIES + query

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    k_head = k_cache + kv_head * stride_k_head
    pool_rows = tl.load(token_rows + begin + lane, mask=begin + lane < end, other=0)
    for start in range(begin, end, BLOCK_N):
        position = start + lane
        k = tl.load(
            k_head + pool_rows.to(tl.int64)[:, None] * stride_k_row + dim[None, :],
            mask=(position < end)[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        pool_rows = tl.load(token_rows + position + BLOCK_N, mask=position + BLOCK_N < end, other=0)
        logits = tl.dot(q_tile, tl.trans(k), input_precision=DOT_PRECISION) * scale_log2
        seen = (position[None, :] <= query_position[:, None]) & (position < end)[None, :]
        logits = tl.where(seen, logits, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logits, axis=1))
        # A row that has seen no position yet has no finite maximum to subtract.
        shift = tl.where(new_max > float("-inf"), new_max, 0.0)
        running_sum = running_sum * tl.exp2(running_max - shift)
        running_sum += tl.sum(tl.exp2(logits - shift[:, None]), axis=1)
        running_max = new_max

    tl.store(
        split_lse + split.to(tl.int64) * stride_split
        + (batch * QUERIES + query) * (tl.num_programs(0) // ROW_BLOCKS * GROUP) + head,
        (running_max + tl.log2(running_sum)) * LN_2,
        mask=query < QUERIES,
    )  # fmt: skip


@triton.jit
def _scores_kernel(
    q, k_cache, req_to_token, req_pool_indices, seq_lens, num_queries, num_candidates, lse, out, scale_log2,
    stride_q_batch, stride_q_query, stride_q_head, stride_k_row, stride_k_head, stride_token_slot,
    stride_lse_batch, stride_lse_query, stride_lse_head, stride_out_batch, stride_out_head,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    DOT_PRECISION: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    """Pass 2: mean weight of one split of the candidates, all query rows against each tile of K."""
    kv_head, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(req_pool_indices + batch).to(tl.int64)
    seq_len = tl.load(seq_lens + batch).to(tl.int32)
    counted = tl.load(num_queries + batch).to(tl.int32)
    candidates = tl.load(num_candidates + batch).to(tl.int32)
    token_rows = req_to_token + slot * stride_token_slot
    per_split = tl.cdiv(tl.cdiv(candidates, tl.num_programs(1)), BLOCK_N) * BLOCK_N
    begin = split * per_split
    end = tl.minimum(begin + per_split, candidates)

    lane = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    k_head = k_cache + kv_head * stride_k_head
    q_batch = q + batch.to(tl.int64) * stride_q_batch
    lse_batch = lse + batch * stride_lse_batch
    out_row = out + batch.to(tl.int64) * stride_out_batch + kv_head * stride_out_head
    num_rows = tl.maximum(counted * GROUP, 1).to(tl.float32)
    query, row_counts, q_tile, row_lse = _counted_rows(
        q_batch, lse_batch, kv_head, 0, counted, stride_q_query, stride_q_head, stride_lse_query,
        stride_lse_head, GROUP, QUERIES, HEAD_DIM, BLOCK_D, BLOCK_M,
    )  # fmt: skip
    pool_rows = tl.load(token_rows + begin + lane, mask=begin + lane < end, other=0)
    for start in range(begin, end, BLOCK_N):
        position = start + lane
        k = tl.load(
            k_head + pool_rows.to(tl.int64)[:, None] * stride_k_row + dim[None, :],
            mask=(position < end)[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        pool_rows = tl.load(token_rows + position + BLOCK_N, mask=position + BLOCK_N < end, other=0)
        total = tl.zeros([BLOCK_N], tl.float32)
        for row_block in tl.static_range(ROW_BLOCKS):
            if ROW_BLOCKS > 1:  # else the only block stays loaded
                query, row_counts, q_tile, row_lse = _counted_rows(
                    q_batch, lse_batch, kv_head, row_block, counted, stride_q_query, stride_q_head,
                    stride_lse_query, stride_lse_head, GROUP, QUERIES, HEAD_DIM, BLOCK_D, BLOCK_M,
                )  # fmt: skip
            logits = tl.dot(q_tile, tl.trans(k), input_precision=DOT_PRECISION) * scale_log2
            seen = position[None, :] <= (seq_len - QUERIES + query)[:, None]
            weights = tl.exp2(logits - (row_lse * LOG2_E)[:, None])
            total += tl.sum(tl.where(seen & row_counts[:, None], weights, 0.0), axis=0)
        tl.store(out_row + position, total / num_rows, mask=position < end)


@triton.jit
def _counted_rows(
    q_batch, lse_batch, kv_head, row_block, counted, stride_q_query, stride_q_head, stride_lse_query,
    stride_lse_head,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rows (query, head of the group) of a block: query, whether it counts, q and log-sum-exp."""
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_counts = (query < QUERIES) & (query >= QUERIES - counted)
    q_tile = tl.load(
        q_batch + (query * stride_q_query + head * stride_q_head)[:, None] + dim[None, :],
        mask=row_counts[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    row_lse = tl.load(
        lse_batch + query * stride_lse_query + head * stride_lse_head, mask=row_counts, other=0.0
    )
    return query, row_counts, q_tile, row_lse
