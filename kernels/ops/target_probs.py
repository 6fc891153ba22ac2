"""Filtered target distributions in Triton: softmax, top-k, top-p and min-p without sorting the vocabulary.

What the filters keep of a row is a prefix of its ranks, so the smallest kept probability decides, and among
tokens of that very probability the token id. The threshold is found by counting tokens and mass above a few
pivots, which narrows its range, in a list of the tokens that min-p and top-p do not rule out at once; where
that is too long (flat distributions, top-k alone) in the row. So the row is read twice, for the list and for
the result. Probabilities are recomputed from the logits, by the formula of the sampling kernels.
"""

import torch
import triton
import triton.language as tl
from s3r_sglang.kernels.ops._checks import check_device, check_output, check_vectors, require
from s3r_sglang.kernels.ops.chain_sampling import (
    _check_rows,
    _load_row_stats,
    _max_splits,
    _probs,
    _row_stats,
)

OP = "target_probs"
# 128 registers a thread: 16 warps fill an SM. 448 rows of 151,936 with top-p on an H200: 704 us; 899 with 7 pivots
# and loads that are not pipelined, 739 with 3 pivots and 4 stages, 925 with 8 warps.
BLOCK, NUM_WARPS, PIVOTS, STAGES = 2048, 16, 4, 3
# Places in the list for each lane of a block: in all 32K, of which a peaked distribution uses one or two thousand.
PLACES = 16


def target_probs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write softmax(logits / temperature), filtered by top-k, top-p and min-p and renormalised, to `out`.

    The law is that of the reference, whose probabilities and masses differ by float rounding: a token may be
    kept by one alone if the mass ranked before it is that close to top_p. A row without filters holds the
    bits that `draft_sample` would write.

    Args:
        logits: [B * R, V], any floating dtype, contiguous in V; the R rows of a request are adjacent.
        temperatures: [B] float32, positive.
        top_ks: [B] integer; at most 1 is greedy, V and more are off.
        top_ps, min_ps: [B] float32; 1 and 0 are off.
        out: [B * R, V] float32, contiguous in V.

    Returns:
        `out`. Rows of NaN or of -inf alone hold zeros or NaN, from which `race_sample` draws token 0.

    Raises:
        ValueError: a shape, dtype or stride does not fit.
        RuntimeError: CPU tensors without Triton's interpreter.

    Safe in a CUDA graph: the grid depends on shapes only.
    """
    rows, vocab = logits.shape
    batch_size = len(temperatures)
    check_device(OP, logits, temperatures, top_ks, top_ps, min_ps, out)
    _check_rows(OP, logits=logits)
    require(batch_size > 0 and rows % batch_size == 0, f"{OP}: {rows} rows for {batch_size} requests")
    check_vectors(OP, batch_size, top_ks=top_ks)
    for name, vector in {"temperatures": temperatures, "top_ps": top_ps, "min_ps": min_ps}.items():
        check_output(OP, name, vector, (batch_size,), torch.float32)
    check_output(OP, "out", out, (rows, vocab), torch.float32)
    stats = _row_stats(logits, temperatures, rows_per_request=rows // batch_size)
    lists = torch.empty(rows, PLACES * BLOCK, dtype=torch.float32, device=logits.device)
    _target_probs_kernel[(rows,)](
        logits, temperatures, top_ks, top_ps, min_ps, *stats, lists, out, vocab, logits.stride(0), out.stride(0),
        rows // batch_size, stats[0].shape[1], MAX_SPLITS=_max_splits(vocab),
        BLOCK=BLOCK, PLACES=PLACES, PIVOTS=PIVOTS, STAGES=STAGES, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _load_probs(row, lanes, vocab, parameters):
    """Probabilities of `lanes`; 0 beyond the vocabulary."""
    inverse_temperature, maximum, inverse_normaliser, argmax, greedy = parameters
    x = tl.load(row + lanes, mask=lanes < vocab, other=float("-inf")).to(tl.float32) * inverse_temperature
    return _probs(x, lanes, maximum, inverse_normaliser, argmax, greedy)


@triton.jit
def _key(prob):
    """Bits of a non-negative float, which order like the floats."""
    return prob.to(tl.int32, bitcast=True)


@triton.jit
def _lower_bound(highest, top_p, min_p, vocab):
    """Key of a probability below which nothing is kept.

    Tokens below half of (1 - top_p) / V have less than half of the mass that top-p drops, so the mass above
    them exceeds top_p; by more than sums round, unless top_p is close to 1.
    """
    by_mass = tl.where(top_p < 0.999, (1.0 - top_p) * 0.5 / vocab, 0.0)
    return tl.maximum(_key(highest * min_p), _key(by_mass))


@triton.jit
def _list_probs(
    row, size, vocab, parameters, low, list_,
    BLOCK: tl.constexpr, PLACES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """List the probabilities whose key is at least `low`; returns their number in each lane, and their mass.

    Every lane of a block fills places of its own, which takes no scan. What does not fit is counted only.
    """
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, size, BLOCK, num_stages=STAGES):
        prob = _load_probs(row, first + lane, vocab, parameters)
        listed = (_key(prob) >= low) & (first + lane < vocab)
        tl.store(list_ + counts * BLOCK + lane, prob, mask=listed & (counts < PLACES))
        counts += listed.to(tl.int32)
        masses += tl.where(listed, prob, 0.0)
    return counts, tl.sum(masses, axis=0)


@triton.jit
def _zeros(PIVOTS: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(PIVOTS):
        # Triton does not unpack tuples.
        zeros = zeros + (tl.zeros([BLOCK], dtype),)  # type: ignore[assignment]  # noqa: RUF005
    return zeros


@triton.jit
def _count_above(
    source, size, parameters, counts, low, step, high,
    IS_ROW: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Number and mass of the probabilities above each of the pivots low, low + step, ..., at most `high`."""
    numbers = _zeros(PIVOTS, BLOCK, tl.int32)
    masses = _zeros(PIVOTS, BLOCK, tl.float32)
    for first in tl.range(0, size, BLOCK, num_stages=STAGES):
        lanes = first + tl.arange(0, BLOCK)
        if IS_ROW:
            prob = _load_probs(source, lanes, size, parameters)
        else:
            prob = tl.load(source + lanes, mask=first < counts * BLOCK, other=0.0)
        new_numbers, new_masses = (), ()
        for j in tl.static_range(PIVOTS):
            above = _key(prob) > tl.minimum(low + j * step, high)
            new_numbers = new_numbers + (numbers[j] + above.to(tl.int32),)  # type: ignore[assignment]  # noqa: RUF005
            mass = masses[j] + tl.where(above, prob, 0.0)
            new_masses = new_masses + (mass,)  # type: ignore[assignment]  # noqa: RUF005
        numbers, masses = new_numbers, new_masses
    return numbers, masses


@triton.jit
def _find_threshold(
    source, size, parameters, counts, low, high, mass_from, top_k, top_p,
    IS_ROW: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Narrow low .. high, a range of keys which holds the lowest threshold whose tokens are kept.

    Tokens at a threshold are kept if number and mass of the tokens above it allow it (which is monotone);
    at `high` they are. Ends when the range is one key, or holds one token. The source is a row of logits or
    a list of probabilities; `counts` (by lane) and `mass_from` are of its tokens from low on.

    Returns:
        low, high; number and mass of the tokens above high; number and mass of the tokens from low on.
    """
    number_above = tl.full([], 0, tl.int32)
    mass_above = tl.full([], 0.0, tl.float32)
    number_from = tl.sum(counts, axis=0)
    while (high > low) & (number_from - number_above != 1):
        first, last = low, high
        step = (high - low) // PIVOTS + 1
        numbers, masses = _count_above(
            source, size, parameters, counts, first, step, last, IS_ROW, BLOCK, PIVOTS, STAGES
        )
        for j in tl.static_range(PIVOTS):
            pivot = tl.minimum(first + j * step, last)
            number, mass = tl.sum(numbers[j], axis=0), tl.sum(masses[j], axis=0)
            kept = (number < top_k) & ((mass <= top_p) | (top_p >= 1.0))
            lowest_kept = kept & (pivot < high)
            high = tl.where(lowest_kept, pivot, high)
            number_above = tl.where(lowest_kept, number, number_above)
            mass_above = tl.where(lowest_kept, mass, mass_above)
            low = tl.where(kept, low, pivot + 1)
            number_from = tl.where(kept, number_from, number)
            mass_from = tl.where(kept, mass_from, mass)
    return low, high, number_above, mass_above, number_from, mass_from


@triton.jit(do_not_specialize=["stats_splits"])
def _target_probs_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, maxima, sums, argmaxes, lists, out, vocab,
    logits_stride, out_stride, rows_per_request, stats_splits,
    MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr, PIVOTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    request = index // rows_per_request
    top_k, top_p, min_p = tl.load(top_ks + request), tl.load(top_ps + request), tl.load(min_ps + request)
    inverse_temperature, greedy = 1.0 / tl.load(temperatures + request), top_k <= 1
    maximum, highest, argmax = _load_row_stats(maxima, sums, argmaxes, index, stats_splits, MAX_SPLITS)
    parameters = (inverse_temperature, maximum, highest, argmax, greedy)
    row = logits + index.to(tl.int64) * logits_stride
    list_ = lists + index.to(tl.int64) * (PLACES * BLOCK)
    unfiltered = greedy | ((top_k >= vocab) & (top_p >= 1.0) & (min_p <= 0.0))

    high = _key(highest)
    low = tl.where(unfiltered, high, tl.minimum(_lower_bound(highest, top_p, min_p, vocab), high))
    counts, mass = _list_probs(
        row, tl.where(unfiltered, 0, vocab), vocab, parameters, low, list_, BLOCK, PLACES, STAGES
    )
    most = tl.max(counts, axis=0)
    if most <= PLACES:
        tl.debug_barrier()
        low, high, number_above, mass_above, number_from, mass_from = _find_threshold(
            list_, most * BLOCK, parameters, counts, low, high, mass, top_k, top_p,
            False, BLOCK, PIVOTS, STAGES,
        )  # fmt: skip
    else:
        low, high, number_above, mass_above, number_from, mass_from = _find_threshold(
            row, vocab, parameters, counts, low, high, mass, top_k, top_p, True, BLOCK, PIVOTS, STAGES
        )
    if high > low:  # one token is in the range, and the last to be kept
        threshold = low - 1
        tied, kept_ties, total = 0, 0, mass_from
    else:
        threshold = high
        tied = number_from - number_above
        prob = threshold.to(tl.float32, bitcast=True)
        by_mass = tl.where((top_p >= 1.0) | (prob <= 0.0), tied, (top_p - mass_above) / prob + 1.0)
        kept_ties = tl.minimum(tl.minimum(by_mass, tied).to(tl.int32), top_k - number_above)
        total = mass_above + kept_ties * prob

    seen = tl.full([], 0, tl.int32)
    for first in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        lanes = first + tl.arange(0, BLOCK)
        prob = _load_probs(row, lanes, vocab, parameters)
        is_tied = (_key(prob) == threshold).to(tl.int32)
        before = seen + tl.zeros([BLOCK], tl.int32)
        if kept_ties < tied:  # rare: the scan is for ties that are kept in part
            before += tl.cumsum(is_tied, axis=0) - is_tied
            seen += tl.sum(is_tied, axis=0)
        kept = (_key(prob) > threshold) | ((is_tied > 0) & (before < kept_ties))
        filtered = tl.where(kept, prob / total, 0.0)
        result = tl.where(unfiltered, prob, filtered)
        tl.store(out + index.to(tl.int64) * out_stride + lanes, result, mask=lanes < vocab)
