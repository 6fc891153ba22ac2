"""GRPO's objective with DAPO's token average and clipping (arXiv 2402.03300, section 4.1; arXiv 2503.14476)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """A response and its prompt, as token ids, and the sampler's logprob of each response token."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Batch:
    """Samples padded at the end.

    Attributes:
        input_ids: [N, T] int64.
        mask: [N, T - 1] bool, true where the next token is the response's.
        sampled: [N, T - 1] float32, the sampler's logprobs of these tokens, zero elsewhere.
    """

    input_ids: torch.Tensor
    mask: torch.Tensor
    sampled: torch.Tensor


def batch(samples: Sequence[Sample], device: torch.device | str = "cpu") -> Batch:
    """Pad `samples` to the longest of them."""
    length = max(len(sample.prompt) + len(sample.response) for sample in samples)
    input_ids = torch.zeros(len(samples), length, dtype=torch.long)
    mask = torch.zeros(len(samples), length - 1, dtype=torch.bool)
    sampled = torch.zeros(len(samples), length - 1)
    for row, sample in enumerate(samples):
        ids = torch.tensor(sample.prompt + sample.response)
        span = slice(len(sample.prompt) - 1, len(ids) - 1)
        input_ids[row, : len(ids)] = ids
        mask[row, span] = True
        sampled[row, span] = torch.tensor(sample.logprobs)
    return Batch(input_ids.to(device), mask.to(device), sampled.to(device))


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """[P, G] rewards, normalised within each group."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)


def policy_logprobs(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """[N, T - 1] float32 logprobs of each next token, at temperature 1."""
    logits = model(input_ids=input_ids).logits[:, :-1]
    # Row by row: a float32 copy of all logits would take 2.5 GB per 4K tokens of a vocabulary of 152K.
    rows = [
        -torch.nn.functional.cross_entropy(row.float(), ids, reduction="none")
        for row, ids in zip(logits, input_ids[:, 1:], strict=True)
    ]
    return torch.stack(rows)


def policy_loss(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    mask: torch.Tensor,
    advantage: torch.Tensor,
    *,
    clip: tuple[float, float] = (0.2, 0.28),
    weights: torch.Tensor | None = None,
    tokens: int | None = None,
) -> torch.Tensor:
    """Clipped surrogate, averaged over response tokens.

    Args:
        logprobs: [N, T], with gradient, of the policy that is trained.
        old: [N, T], of the dense policy before the update.
        mask: [N, T] bool.
        advantage: [N, 1].
        clip: how far the ratio of the two may go below and above 1.
        weights: [N, T] factors outside of the clipping, see `correction.SparseCorrection`.
        tokens: what to divide by; default: response tokens in `mask`.
    """
    ratio = torch.exp(torch.where(mask, logprobs - old, 0.0))
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage)
    if weights is not None:
        surrogate = surrogate * weights
    return -(surrogate * mask).sum() / (tokens or mask.sum())
