"""Counter-based random words: Philox4x32-10 (Salmon et al., SC 2011) in plain PyTorch.

Every random number of the engine is a pure function of (request seed, round, step, stream, lane), so a
response depends neither on the batch it ran in nor on the order of launches, and a re-run reproduces it.

Words are held in int64 tensors with values in [0, 2**32): PyTorch has no arithmetic on uint32. Products of
two words wrap around in int64, which leaves all 64 bits right; a shift followed by a mask reads the halves.
"""

from enum import IntEnum

import torch

WORD_MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85

# The largest float32 below one. A word rounded to float32 can reach 2**32 exactly, hence the clamp.
BELOW_ONE = 1.0 - 2.0**-24


class Stream(IntEnum):
    """The purposes random numbers serve; streams never share a counter, so they are independent."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    PREFILL = 3


Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(
    seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> Words:
    """Philox4x32-10 of the counter (c0, c1, c2, c3) under a 64-bit key.

    Args:
        seed: int64, any shape that broadcasts; its low and high words are the key.
        c0, c1, c2, c3: int64 words in [0, 2**32), broadcastable with `seed`.

    Returns:
        Four int64 tensors of the broadcast shape with values in [0, 2**32).
    """
    k0, k1 = seed & WORD_MASK, (seed >> 32) & WORD_MASK
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        high_0, high_1 = (product_0 >> 32) & WORD_MASK, (product_1 >> 32) & WORD_MASK
        c0, c1 = high_1 ^ c1 ^ k0, product_1 & WORD_MASK
        c2, c3 = high_0 ^ c3 ^ k1, product_0 & WORD_MASK
        k0, k1 = (k0 + WEYL_0) & WORD_MASK, (k1 + WEYL_1) & WORD_MASK
    return c0, c1, c2, c3


def random_words(
    seeds: torch.Tensor, rounds: torch.Tensor, steps: torch.Tensor | int, stream: int, num_lanes: int
) -> torch.Tensor:
    """One random word per request and lane.

    Lane v is word v % 4 of counter v // 4: a call of Philox yields four words, and drawing a whole
    vocabulary with one call per lane would make the GPU kernels bound by integer multiplication.

    Args:
        seeds: [N] int64, the per-request keys.
        rounds: [N] int64, in [0, 2**32): the sequence length at the start of the round.
        steps: int or [N] int64, position within the round.
        stream: a `Stream`.
        num_lanes: number of words per request.

    Returns:
        [N, num_lanes] int64, uniform on [0, 2**32).
    """
    lanes = torch.arange((num_lanes + 3) // 4, device=seeds.device)
    steps = torch.as_tensor(steps, device=seeds.device, dtype=torch.int64).expand_as(seeds)
    c1, c2 = rounds.to(torch.int64)[:, None], steps[:, None]
    words = philox(seeds[:, None], lanes[None, :], c1, c2, torch.full_like(c1, int(stream)))
    return torch.stack(words, dim=-1).flatten(1)[:, :num_lanes]


def coins(words: torch.Tensor) -> torch.Tensor:
    """Uniform float32 in [0, 1) at a resolution of 2**-32, zero included."""
    return (words.float() * 2.0**-32).clamp_(max=BELOW_ONE)


def exponentials(words: torch.Tensor) -> torch.Tensor:
    """Standard exponential variates -log(1 - U), U = (word + 0.5) * 2**-32, float32 and strictly positive.

    The orientation matters: races are won by small variates, and near zero U keeps full relative
    precision in float32, where -log(U) near U = 1 would have steps of 6e-8.
    """
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_(max=BELOW_ONE)
    return -torch.log1p(-uniform)
