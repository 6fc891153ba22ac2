"""Exact sampling of a draft chain in Triton; the law and the arguments are those of the reference of the same
name, the random words are bit-equal, and probabilities agree within float rounding.

A vocabulary row is split over `splits` programs so that a small batch fills the device. No kernel needs an
fp32 copy of the logits, and verification never materialises p: a first pass reduces each row to its maximum
and normaliser, acceptance then needs p at the drafted tokens only, and the residual race reads a single row
of logits per request, the first rejected one.

Memory: q is the one large buffer, 4 * B * k * V bytes: 933 MB for B = 256, k = 6, V = 151,936 (233 MB for
B = 64). The partial results of the splits take less than 100 KB.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from s3r_sglang.kernels.ops._checks import check_device, require
from s3r_sglang.kernels.ops._launch import num_multiprocessors
from s3r_sglang.kernels.ops.philox import coin, exponentials_of_lanes
from s3r_sglang.kernels.reference.philox import Stream

_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
_RESIDUAL = tl.constexpr(int(Stream.RESIDUAL))
_INT32_MAX = tl.constexpr(2**31 - 1)


class _Tiles(NamedTuple):
    """Launch shape of the passes over the vocabulary.

    Attributes:
        block: tokens per iteration of a program, a multiple of 4.
        num_warps: warps per program.
        programs_per_sm: what to split rows for. The verify race, with 126 registers a thread, fits two
            programs of 8 warps on an SM, the other passes at least three.
        num_stages: blocks in flight: the loops are short on bytes in flight, not on instructions.
    """

    block: int = 2048
    num_warps: int = 8
    programs_per_sm: int = 4
    num_stages: int = 1


_TILES = _Tiles()


@triton.jit
def _row_stats_kernel(
    logits, temperatures, maxima, sums, argmaxes, vocab, chunk, logits_stride, rows_per_request,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of exponentials and first argmax of logits / temperature over one chunk of one row."""
    row, split = tl.program_id(0), tl.program_id(1)
    inverse_temperature = 1.0 / tl.load(temperatures + row // rows_per_request)
    base = logits + row.to(tl.int64) * logits_stride
    start = split * chunk
    # Every lane keeps a running maximum and sum of its own: one exponential per element, no exchange
    # between threads inside the loop.
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    where_highest = start + tl.arange(0, BLOCK)
    for first in tl.range(start, start + chunk, BLOCK, num_stages=STAGES):
        lanes = first + tl.arange(0, BLOCK)
        x = tl.load(base + lanes, mask=lanes < vocab, other=float("-inf"))
        x = x.to(tl.float32) * inverse_temperature
        grew = x > highest
        # Equal values include two of -inf, whose difference would be NaN.
        decay = tl.where(x == highest, 1.0, tl.exp(-tl.abs(x - highest)))
        total = tl.where(grew, total * decay + 1.0, total + decay)
        highest = tl.where(grew, x, highest)
        where_highest = tl.where(grew, lanes, where_highest)
    maximum = tl.max(highest, axis=0)
    # A lane whose maximum is -inf has seen masked tokens only; its sum means nothing.
    total = tl.where(highest > float("-inf"), total * tl.exp(highest - maximum), 0.0)
    partial = row * tl.num_programs(1) + split
    tl.store(maxima + partial, maximum)
    tl.store(sums + partial, tl.sum(total, axis=0))
    tl.store(argmaxes + partial, tl.min(tl.where(highest == maximum, where_highest, _INT32_MAX), axis=0))


@triton.jit
def _load_row_stats(maxima, sums, argmaxes, row, splits, MAX_SPLITS: tl.constexpr):
    """Combine the chunks of a row: maximum, inverse of the normaliser, first argmax."""
    split = tl.arange(0, MAX_SPLITS)
    partials = row * splits + split
    highest = tl.load(maxima + partials, mask=split < splits, other=float("-inf"))
    total = tl.load(sums + partials, mask=split < splits, other=0.0)
    maximum = tl.max(highest, axis=0)
    normaliser = tl.sum(tl.where(highest > float("-inf"), total * tl.exp(highest - maximum), 0.0), axis=0)
    places = tl.load(argmaxes + partials, mask=split < splits, other=_INT32_MAX)
    candidates = tl.where(highest == maximum, places, _INT32_MAX)
    return maximum, 1.0 / normaliser, tl.min(candidates, axis=0)


@triton.jit
def _probs(x, tokens, maximum, inverse_normaliser, argmax, greedy):
    """Probability of `tokens` with scaled logits x: one formula for q, acceptance and residual."""
    return tl.where(greedy, (tokens == argmax).to(tl.float32), tl.exp(x - maximum) * inverse_normaliser)


@triton.jit
def _race(weights, noise, lanes, best_score, best_token):
    """Enter a block of weights into the race, with noise as fractions; a weight of zero never wins."""
    numerator, denominator = noise
    score = tl.where(weights > 0.0, weights * denominator / numerator, -1.0)
    better = score > best_score
    return tl.where(better, score, best_score), tl.where(better, lanes, best_token)


@triton.jit
def _load_partials(scores, tokens, row, splits, MAX_SPLITS: tl.constexpr):
    """Best scores and tokens of the chunks of a row; padding has a score below all."""
    split = tl.arange(0, MAX_SPLITS)
    score = tl.load(scores + row * splits + split, mask=split < splits, other=-3.0)
    return score, tl.load(tokens + row * splits + split, mask=split < splits, other=_INT32_MAX)


@triton.jit
def _winner(scores, tokens):
    """The best score and its token, the lowest on ties."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, tokens, _INT32_MAX), axis=0)


@triton.jit(do_not_specialize=["step", "stream", "stats_splits"])
def _draft_race_kernel(
    source, temperatures, top_ks, maxima, sums, argmaxes, q_out, scores, tokens, seeds, rounds, step, stream,
    vocab, chunk, source_stride, q_stride, stats_splits,
    FROM_LOGITS: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Race over one chunk of a row of the source: logits, whose distribution goes to q_out, or weights."""
    row, split = tl.program_id(0), tl.program_id(1)
    seed, round_ = tl.load(seeds + row), tl.load(rounds + row)
    base = source + row.to(tl.int64) * source_stride
    if FROM_LOGITS:
        inverse_temperature, greedy = 1.0 / tl.load(temperatures + row), tl.load(top_ks + row) <= 1
        maximum, inverse_normaliser, argmax = _load_row_stats(
            maxima, sums, argmaxes, row, stats_splits, MAX_SPLITS
        )
    start = split * chunk
    best_score = tl.full([BLOCK], -2.0, tl.float32)
    best_token = start + tl.arange(0, BLOCK)
    for first in tl.range(start, start + chunk, BLOCK, num_stages=STAGES):
        lanes = first + tl.arange(0, BLOCK)
        valid = lanes < vocab
        if FROM_LOGITS:
            x = tl.load(base + lanes, mask=valid, other=float("-inf")).to(tl.float32) * inverse_temperature
            weights = _probs(x, lanes, maximum, inverse_normaliser, argmax, greedy)
            tl.store(q_out + row.to(tl.int64) * q_stride + lanes, weights, mask=valid)
        else:
            weights = tl.load(base + lanes, mask=valid, other=0.0)
        noise = exponentials_of_lanes(seed, round_, step, stream, first, BLOCK)
        best_score, best_token = _race(weights, noise, lanes, best_score, best_token)
    score, token = _winner(best_score, best_token)
    partial = row * tl.num_programs(1) + split
    tl.store(scores + partial, score)
    tl.store(tokens + partial, token)


@triton.jit(do_not_specialize=["splits"])
def _draft_winner_kernel(scores, tokens, out, splits, MAX_SPLITS: tl.constexpr):
    row = tl.program_id(0)
    score, token = _load_partials(scores, tokens, row, splits, MAX_SPLITS)
    _, token = _winner(score, token)
    tl.store(out + row, token.to(tl.int64))


@triton.jit(do_not_specialize=["batch_size", "stats_splits"])
def _verify_race_kernel(
    source, temperatures, top_ks, maxima, sums, argmaxes, draft_tokens, q, num_accepted, scores, tokens,
    seeds, rounds, batch_size, vocab, chunk, source_stride, q_stride_request, q_stride_step, stats_splits,
    FROM_LOGITS: tl.constexpr, NUM_DRAFTS: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Accept drafts, then race for the next token over one chunk of the first rejected (or the bonus) row.

    Every chunk of a request repeats the acceptance: k rows of statistics, which costs less than a launch.
    Two races share their noise, on the residual and on p; the second counts if the residual has no mass.
    """
    request, split = tl.program_id(0), tl.program_id(1)
    seed, round_ = tl.load(seeds + request), tl.load(rounds + request)
    first_row = request * (NUM_DRAFTS + 1)
    if FROM_LOGITS:
        inverse_temperature = 1.0 / tl.load(temperatures + request)
        greedy = tl.load(top_ks + request) <= 1
    accepted, accepting = 0, 1
    for j in tl.static_range(NUM_DRAFTS):
        row = first_row + j
        token = tl.load(draft_tokens + request * NUM_DRAFTS + j).to(tl.int32)
        p_drafted = tl.load(source + row.to(tl.int64) * source_stride + token).to(tl.float32)
        if FROM_LOGITS:
            maximum, inverse_normaliser, argmax = _load_row_stats(
                maxima, sums, argmaxes, row, stats_splits, MAX_SPLITS
            )
            p_drafted = _probs(
                p_drafted * inverse_temperature, token, maximum, inverse_normaliser, argmax, greedy
            )
        q_drafted = tl.load(q + request.to(tl.int64) * q_stride_request + j * q_stride_step + token)
        accepting *= (coin(seed, round_, j, _ACCEPT) * q_drafted < p_drafted).to(tl.int32)
        accepted += accepting

    row = first_row + accepted
    base = source + row.to(tl.int64) * source_stride
    q_row = q + request.to(tl.int64) * q_stride_request + tl.minimum(accepted, NUM_DRAFTS - 1) * q_stride_step
    if FROM_LOGITS:
        maximum, inverse_normaliser, argmax = _load_row_stats(
            maxima, sums, argmaxes, row, stats_splits, MAX_SPLITS
        )
    start = split * chunk
    residual_score = tl.full([BLOCK], -2.0, tl.float32)
    target_score = residual_score
    residual_token = start + tl.arange(0, BLOCK)
    target_token = residual_token
    for first in tl.range(start, start + chunk, BLOCK, num_stages=STAGES):
        lanes = first + tl.arange(0, BLOCK)
        valid = lanes < vocab
        if FROM_LOGITS:
            x = tl.load(base + lanes, mask=valid, other=float("-inf")).to(tl.float32) * inverse_temperature
            p = _probs(x, lanes, maximum, inverse_normaliser, argmax, greedy)
        else:
            p = tl.load(base + lanes, mask=valid, other=0.0)
        # After a full acceptance q counts as zero, so that the residual is p: the bonus token.
        q_next = tl.load(q_row + lanes, mask=valid & (accepted < NUM_DRAFTS), other=0.0)
        noise = exponentials_of_lanes(seed, round_, 0, _RESIDUAL, first, BLOCK)
        residual_score, residual_token = _race(p - q_next, noise, lanes, residual_score, residual_token)
        target_score, target_token = _race(p, noise, lanes, target_score, target_token)
    splits = tl.num_programs(1)
    partial = request * splits + split
    score, token = _winner(residual_score, residual_token)
    tl.store(scores + partial, score)
    tl.store(tokens + partial, token)
    score, token = _winner(target_score, target_token)
    tl.store(scores + batch_size * splits + partial, score)
    tl.store(tokens + batch_size * splits + partial, token)
    if split == 0:
        tl.store(num_accepted + request, accepted)


@triton.jit(do_not_specialize=["batch_size", "splits"])
def _verify_winner_kernel(
    num_accepted, scores, tokens, draft_tokens, out, accept_lens, batch_size, splits,
    NUM_DRAFTS: tl.constexpr, COLUMNS: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    score, token = _load_partials(scores, tokens, request, splits, MAX_SPLITS)
    residual_score, residual_token = _winner(score, token)
    score, token = _load_partials(scores, tokens, batch_size + request, splits, MAX_SPLITS)
    _, target_token = _winner(score, token)
    next_token = tl.where(residual_score > 0.0, residual_token, target_token)

    accepted = tl.load(num_accepted + request)
    columns = tl.arange(0, COLUMNS)
    kept = tl.load(draft_tokens + request * NUM_DRAFTS + columns, mask=columns < accepted, other=0)
    row = tl.where(columns == accepted, next_token, kept.to(tl.int32))
    tl.store(out + request * (NUM_DRAFTS + 1) + columns, row, mask=columns <= NUM_DRAFTS)
    tl.store(accept_lens + request, accepted + 1)


def _split(rows: int, vocab: int, device: torch.device) -> tuple[int, int]:
    """Number of chunks per row (a power of two) and tokens per chunk; depends on shapes alone."""
    blocks = triton.cdiv(vocab, _TILES.block)
    wanted = triton.cdiv(_TILES.programs_per_sm * num_multiprocessors(device), rows)
    splits = triton.next_power_of_2(min(wanted, blocks))
    return splits, triton.cdiv(blocks, splits) * _TILES.block


def _max_splits(vocab: int) -> int:
    """Bound of the number of chunks per row. Kernels know this alone, so that all batch sizes share them."""
    return triton.next_power_of_2(triton.cdiv(vocab, _TILES.block))


def _row_stats(logits, temperatures, rows_per_request):
    """Launch the first pass; returns (maxima, sums, argmaxes) of shape [rows, splits]."""
    rows, vocab = logits.shape
    splits, chunk = _split(rows, vocab, logits.device)
    maxima = torch.empty(rows, splits, dtype=torch.float32, device=logits.device)
    sums, argmaxes = torch.empty_like(maxima), torch.empty_like(maxima, dtype=torch.int32)
    _row_stats_kernel[(rows, splits)](
        logits, temperatures, maxima, sums, argmaxes, vocab, chunk, logits.stride(0), rows_per_request,
        BLOCK=_TILES.block, STAGES=_TILES.num_stages, num_warps=_TILES.num_warps,
    )  # fmt: skip
    return maxima, sums, argmaxes


def _check_rows(op: str, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        require(tensor.stride(-1) == 1, f"{op}: {name} must be contiguous along the vocabulary")


def race_sample(
    weights: torch.Tensor, seeds: torch.Tensor, rounds: torch.Tensor, step: int, stream: int
) -> torch.Tensor:
    """Draw one token per row of weights [N, V] float32; see the reference.

    Raises:
        ValueError: weights are not float32 or not contiguous along the vocabulary.
        RuntimeError: CPU tensors without Triton's interpreter.
    """
    require(weights.dtype == torch.float32, f"race_sample: weights must be float32, got {weights.dtype}")
    _check_rows("race_sample", weights=weights)
    check_device("chain_sampling.race_sample", weights, seeds, rounds)
    return _draft_race(weights, None, seeds, rounds, step, stream)


def draft_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    seeds: torch.Tensor,
    rounds: torch.Tensor,
    step: int,
    q_out: torch.Tensor,
) -> torch.Tensor:
    """Write q_out [B, V] float32 and draw one token per request from it; see the reference.

    Raises:
        ValueError: logits or q_out are not contiguous along the vocabulary, or q_out is not float32 of the
            shape of the logits.
        RuntimeError: CPU tensors without Triton's interpreter.
    """
    require(
        q_out.dtype == torch.float32 and q_out.shape == logits.shape,
        f"draft_sample: q_out must be float32 {tuple(logits.shape)}, got {q_out.dtype} {tuple(q_out.shape)}",
    )
    _check_rows("draft_sample", logits=logits, q_out=q_out)
    check_device("chain_sampling.draft_sample", logits, temperatures, top_ks, seeds, rounds, q_out)
    stats = _row_stats(logits, temperatures, rows_per_request=1)
    return _draft_race(logits, (temperatures, top_ks, *stats, q_out), seeds, rounds, step, Stream.DRAFT)


def _draft_race(source, distribution, seeds, rounds, step, stream):
    """Race over rows of weights, or of logits if their (temperatures, top_ks, *stats, q_out) are given."""
    rows, vocab = source.shape
    splits, chunk = _split(rows, vocab, source.device)
    scores = torch.empty(rows, splits, dtype=torch.float32, device=source.device)
    tokens = torch.empty_like(scores, dtype=torch.int32)
    out = torch.empty(rows, dtype=torch.int64, device=source.device)
    temperatures, top_ks, maxima, sums, argmaxes, q_out = distribution or (source,) * 6
    max_splits = _max_splits(vocab)
    _draft_race_kernel[(rows, splits)](
        source, temperatures, top_ks, maxima, sums, argmaxes, q_out, scores, tokens, seeds, rounds, step,
        int(stream), vocab, chunk, source.stride(0), q_out.stride(0), splits,
        FROM_LOGITS=distribution is not None, MAX_SPLITS=max_splits, BLOCK=_TILES.block,
        STAGES=_TILES.num_stages, num_warps=_TILES.num_warps,
    )  # fmt: skip
    _draft_winner_kernel[(rows,)](scores, tokens, out, splits, MAX_SPLITS=max_splits, num_warps=1)
    return out


def verify_sample(
    p: torch.Tensor, draft_tokens: torch.Tensor, q: torch.Tensor, seeds: torch.Tensor, rounds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts against given distributions p [B, k + 1, V] float32; see the reference.

    Raises:
        ValueError: p or q are not float32, or not contiguous along the vocabulary.
        RuntimeError: CPU tensors without Triton's interpreter.
    """
    require(p.dtype == torch.float32, f"verify_sample: p must be float32, got {p.dtype}")
    return _verify_race("verify_sample", p.flatten(0, 1), None, draft_tokens, q, seeds, rounds)


def verify_sample_from_logits(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    draft_tokens: torch.Tensor,
    q: torch.Tensor,
    seeds: torch.Tensor,
    rounds: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts against unfiltered targets given by logits [B * (k + 1), V]; see the reference.

    Raises:
        ValueError: q is not float32, or logits or q are not contiguous along the vocabulary.
        RuntimeError: CPU tensors without Triton's interpreter.
    """
    return _verify_race(
        "verify_sample_from_logits", logits, (temperatures, top_ks), draft_tokens, q, seeds, rounds
    )


def _verify_race(op, source, temperature_and_top_k, draft_tokens, q, seeds, rounds):
    batch_size, num_drafts = draft_tokens.shape
    vocab = source.shape[-1]
    require(q.dtype == torch.float32, f"{op}: q must be float32, got {q.dtype}")
    _check_rows(op, source=source, q=q)
    check_device(f"chain_sampling.{op}", source, draft_tokens, q, seeds, rounds)
    draft_tokens = draft_tokens.contiguous()

    from_logits = temperature_and_top_k is not None
    stats_splits = _split(len(source), vocab, source.device)[0]
    distribution = (source,) * 5
    if from_logits:
        stats = _row_stats(source, temperature_and_top_k[0], rows_per_request=num_drafts + 1)
        distribution = (*temperature_and_top_k, *stats)
    splits, chunk = _split(batch_size, vocab, source.device)
    max_splits = _max_splits(vocab)
    scores = torch.empty(2, batch_size, splits, dtype=torch.float32, device=q.device)
    partial_tokens = torch.empty_like(scores, dtype=torch.int32)
    tokens = torch.empty(batch_size, num_drafts + 1, dtype=torch.int32, device=q.device)
    num_accepted, accept_lens = torch.empty(2, batch_size, dtype=torch.int32, device=q.device)
    _verify_race_kernel[(batch_size, splits)](
        source, *distribution, draft_tokens, q, num_accepted, scores, partial_tokens, seeds, rounds,
        batch_size, vocab, chunk, source.stride(0), q.stride(0), q.stride(1), stats_splits,
        FROM_LOGITS=from_logits, NUM_DRAFTS=num_drafts, MAX_SPLITS=max_splits, BLOCK=_TILES.block,
        STAGES=_TILES.num_stages, num_warps=_TILES.num_warps,
    )  # fmt: skip
    _verify_winner_kernel[(batch_size,)](
        num_accepted, scores, partial_tokens, draft_tokens, tokens, accept_lens, batch_size, splits,
        NUM_DRAFTS=num_drafts, COLUMNS=triton.next_power_of_2(num_drafts + 1), MAX_SPLITS=max_splits,
        num_warps=1,
    )  # fmt: skip
    return tokens, accept_lens
