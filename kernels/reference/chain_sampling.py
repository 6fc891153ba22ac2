"""Exact sampling of a draft chain in plain PyTorch (speculative sampling, Leviathan et al. 2023; S3R,
arXiv 2610.13202, stage 3).

The accept and residual rules together make every emitted token a sample of p, whatever q is, provided that
q is the very tensor the draft was drawn from and that drafts, coins and residual draws are independent.

Draws are exponential races: argmax_v w_v / E_v with independent E_v ~ Exp(1) picks v with probability
w_v / sum(w), so weights need no normalisation. With 32-bit words a token of probability q wins with
probability q * x / sinh(x), x = 2**-33 / q: half as often as it should at q = 5e-11. Were all of a vocabulary
of 152K about that unlikely, 4e-6 of its mass would be lost; a float32 inverse CDF starts to lose at 6e-8.
"""

import torch
from s3r_sglang.kernels.reference.philox import Stream, coins, exponentials, random_words


def softmax_probs(
    logits: torch.Tensor, temperatures: torch.Tensor, greedy: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(logits / temperature), and the one-hot argmax for greedy rows.

    Args:
        logits: [B, R, V] of any floating dtype; R rows share a request's parameters.
        temperatures: [B] float32, positive.
        greedy: [B] bool, or None if no row is.

    Returns:
        [B, R, V] float32. A tie for the maximum of a greedy row goes to the lowest token id.
    """
    logits = logits.float()
    probs = torch.softmax(logits / temperatures.view(-1, 1, 1), dim=-1)
    if greedy is None:
        return probs
    one_hot = torch.zeros_like(probs).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(greedy.view(-1, 1, 1), one_hot, probs)


def filter_probs(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    max_top_k: int | None = None,
) -> torch.Tensor:
    """Top-k, top-p and min-p with the law of SGLang's PyTorch sampler
    (`top_k_top_p_min_p_sampling_from_probs_torch`), renormalised.

    All three filters look at the unfiltered probabilities in descending order: rank >= top_k goes, the mass
    of the ranks before exceeding top_p goes, less than min_p times the maximum goes. Equal probabilities
    rank by token id. Two differences, both within float rounding: top_p >= 1 filters nothing, although the
    running sum of a long vocabulary may pass 1; and a request without filters keeps its input bit for bit,
    so that its tokens do not depend on what its neighbours in the batch asked for.

    What stays is a prefix of the ranks, so its length and its smallest value decide, and the order of tokens
    is needed only among those of that value: sorted values suffice, and no more of them than max_top_k.

    Args:
        probs: [B, R, V] float32, each row summing to one.
        top_ks: [B] int32; values >= V are off.
        top_ps, min_ps: [B] float32; 1 and 0 are off.
        max_top_k: a bound on all top_ks which the host knows, or None.

    Returns:
        [B, R, V] float32.
    """
    vocab_size = probs.shape[-1]
    top_ks, top_ps, min_ps = (x.view(-1, 1, 1) for x in (top_ks, top_ps, min_ps))
    if max_top_k is not None and max_top_k < vocab_size:
        ranked = probs.topk(max_top_k, dim=-1).values
    else:
        ranked = probs.sort(dim=-1, descending=True).values
    mass_before = ranked.cumsum(dim=-1) - ranked
    ranks = torch.arange(ranked.shape[-1], device=probs.device)
    kept_ranks = (ranks < top_ks) & ((mass_before <= top_ps) | (top_ps >= 1.0))
    num_kept = (kept_ranks & (ranked >= ranked[..., :1] * min_ps)).sum(dim=-1, keepdim=True).clamp_(min=1)

    smallest = ranked.gather(-1, num_kept - 1)
    num_tied_kept = num_kept - (probs > smallest).sum(dim=-1, keepdim=True)
    tied = probs == smallest
    kept = (probs > smallest) | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= num_tied_kept))
    filtered = probs.masked_fill(~kept, 0.0)
    unfiltered = (top_ks >= vocab_size) & (top_ps >= 1.0) & (min_ps <= 0.0)
    return torch.where(unfiltered, probs, filtered / filtered.sum(dim=-1, keepdim=True))


def race_sample(
    weights: torch.Tensor, seeds: torch.Tensor, rounds: torch.Tensor, step: int, stream: int
) -> torch.Tensor:
    """Draw one token per row with probability proportional to its weight.

    Args:
        weights: [N, V] float32, non-negative, not normalised. A token of weight zero is never drawn unless
            the whole row is zero, which yields token 0.
        seeds, rounds: [N] int64.
        step: draft step, or 0 for a stream with one draw per round.
        stream: a `Stream`.

    Returns:
        [N] int64 token ids.
    """
    noise = exponentials(random_words(seeds, rounds, step, stream, weights.shape[-1]))
    return torch.where(weights > 0, weights / noise, -1.0).argmax(dim=-1)


def draft_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    seeds: torch.Tensor,
    rounds: torch.Tensor,
    step: int,
    q_out: torch.Tensor,
) -> torch.Tensor:
    """Write q, the unfiltered distributions of a draft step, and draw one token from each.

    Args:
        logits: [B, V], any floating dtype.
        temperatures: [B] float32.
        top_ks: [B] integer; a request is greedy if its value is at most 1, other values are ignored.
        seeds, rounds: [B] int64.
        step: draft step within the round.
        q_out: [B, V] float32, contiguous in V; overwritten.

    Returns:
        [B] int64 token ids.
    """
    q_out.copy_(softmax_probs(logits[:, None], temperatures, top_ks <= 1)[:, 0])
    return race_sample(q_out, seeds, rounds, step, Stream.DRAFT)


def residual_weights(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0) per row, and p itself where that has no mass.

    A zero residual means p <= q everywhere, that is p = q: rejection then has probability zero in exact
    arithmetic, and p is the limit of the residual's law as float rounding lets one through.

    Args:
        p, q: [N, V] float32.

    Returns:
        [N, V] float32, not normalised.
    """
    residual = (p - q).clamp_(min=0.0)
    return torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p)


def accepts(coin: torch.Tensor, p_drafted: torch.Tensor, q_drafted: torch.Tensor) -> torch.Tensor:
    """Whether a draft is accepted, which has probability min(1, p / q) for a coin uniform on [0, 1).

    Written without the division, so that q need not be positive, and strict, so that p = 0 rejects even a
    coin of zero. Any shapes that broadcast, float32; returns bool.
    """
    return coin * q_drafted < p_drafted


def accept_lengths(
    p_drafted: torch.Tensor, q_drafted: torch.Tensor, seeds: torch.Tensor, rounds: torch.Tensor
) -> torch.Tensor:
    """Number of leading drafts accepted.

    Args:
        p_drafted, q_drafted: [B, k] float32, probability of each drafted token.
        seeds, rounds: [B] int64.

    Returns:
        [B] int64 in 0..k.
    """
    num_drafts = p_drafted.shape[1]
    words = [random_words(seeds, rounds, step, Stream.ACCEPT, 1) for step in range(num_drafts)]
    accepted = accepts(coins(torch.cat(words, dim=1)), p_drafted, q_drafted)
    return accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)


def verify_sample(
    p: torch.Tensor, draft_tokens: torch.Tensor, q: torch.Tensor, seeds: torch.Tensor, rounds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a prefix of the drafts and sample the token after it.

    Args:
        p: [B, k + 1, V] float32, the target's distributions.
        draft_tokens: [B, k] int64.
        q: [B, k, V] float32, the distributions the drafts were drawn from.
        seeds, rounds: [B] int64.

    Returns:
        tokens [B, k + 1] int32: the accepted drafts, the residual or bonus token, zeros;
        accept_lens [B] int32 in 1..k + 1, the number of valid tokens.
    """
    num_drafts = draft_tokens.shape[1]
    drafted = draft_tokens[:, :, None].to(torch.int64)
    p_drafted, q_drafted = (x[:, :num_drafts].gather(2, drafted).squeeze(2) for x in (p, q))
    num_accepted = accept_lengths(p_drafted, q_drafted, seeds, rounds)

    rows = torch.arange(p.shape[0], device=p.device)
    p_next = p[rows, num_accepted]
    q_next = q[rows, num_accepted.clamp(max=num_drafts - 1)]
    all_accepted = num_accepted == num_drafts
    weights = torch.where(all_accepted[:, None], p_next, residual_weights(p_next, q_next))
    next_token = race_sample(weights, seeds, rounds, 0, Stream.RESIDUAL)

    tokens = torch.zeros(p.shape[0], num_drafts + 1, dtype=torch.int32, device=p.device)
    columns = torch.arange(num_drafts, device=p.device)
    tokens[:, :num_drafts] = draft_tokens.masked_fill(columns >= num_accepted[:, None], 0)
    tokens.scatter_(1, num_accepted[:, None], next_token.to(torch.int32)[:, None])
    return tokens, (num_accepted + 1).to(torch.int32)


def verify_sample_from_logits(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    draft_tokens: torch.Tensor,
    q: torch.Tensor,
    seeds: torch.Tensor,
    rounds: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`verify_sample` for targets without filters.

    Args:
        logits: [B * (k + 1), V], any floating dtype.
        temperatures, top_ks: as for `draft_sample`.
        draft_tokens, q, seeds, rounds: as for `verify_sample`.
    """
    logits = logits.view(len(draft_tokens), -1, logits.shape[-1])
    p = softmax_probs(logits, temperatures, top_ks <= 1)
    return verify_sample(p, draft_tokens, q, seeds, rounds)
