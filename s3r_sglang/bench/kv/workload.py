"""A rollout whose KV outgrows the pool: groups of responses with long-tailed lengths, alike for every engine."""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from s3r_sglang.bench.load import LoadError

# A log-normal length with this median (as a share of the longest, unless another is given) and spread, cut off at
# the longest: mean 0.28 of it, one response in 27 cut off. The paper gives the limit of 16K alone, so the shape is
# ours.
MEDIAN_SHARE, SPREAD = 0.2, 0.9
# Positions beyond a response's end that SGLang and S3R may want for their last round.
SPARE = 8


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they are sent, all at once.

    Attributes:
        prompts: token ids; the responses of a group have the same.
        lengths: tokens of each response. The engine is told `longest` for all of them, as a rollout would.
        longest: most tokens of a response.
    """

    prompts: list[list[int]]
    lengths: list[int]
    longest: int

    @classmethod
    def make(
        cls,
        prompts: list[list[int]],
        *,
        requests: int,
        group_size: int,
        longest: int,
        seed: int,
        median: int | None = None,
    ) -> "Workload":
        """`group_size` responses to each prompt, the last one's cut off at `requests` in all.

        Raises:
            LoadError: the median exceeds the longest.
        """
        return cls(
            prompts=[prompts[i // group_size] for i in range(requests)],
            lengths=response_lengths(requests, longest, seed, median),
            longest=longest,
        )

    @property
    def tokens(self) -> int:
        """Of all responses."""
        return sum(self.lengths)

    @property
    def context(self) -> int:
        """Context length that an engine needs."""
        return max(map(len, self.prompts)) + self.longest + SPARE

    def pool(self, slots: int, pressure: float) -> int:
        """Size of a KV pool, in tokens, of which `slots` requests at a time would need `pressure` times as much.

        Raises:
            LoadError: not even the longest request fits.
        """
        demand = peak_demand([len(prompt) for prompt in self.prompts], self.lengths, slots)
        pool = math.ceil(demand / pressure)
        # Speculation wants two blocks of up to 33 positions behind the last token.
        needed = self.context + 66
        if pool < needed:
            raise LoadError(
                f"a pool of {pool} tokens, 1/{pressure:g} of the peak demand, does not hold one response, which "
                f"takes {needed} with its prompt and a round: more --slots or --requests, or less --pressure"
            )
        return pool


def median_length(longest: int, median: int | None) -> float:
    """Median of the responses in tokens: as given, or a share of the longest."""
    return MEDIAN_SHARE * longest if median is None else median


def response_lengths(count: int, longest: int, seed: int, median: int | None = None) -> list[int]:
    """Long-tailed lengths in 1 … `longest`, the first ones the same for any `count`."""
    if median is not None and median > longest:
        raise LoadError(f"a median of {median} tokens exceeds the longest response, {longest}")
    draw = random.Random(seed)
    log_median = math.log(median_length(longest, median))
    return [min(longest, max(1, round(draw.lognormvariate(log_median, SPREAD)))) for _ in range(count)]


def peak_demand(prompt_lengths: Sequence[int], lengths: Sequence[int], slots: int) -> int:
    """Most positions that requests would hold at a time if memory were unlimited.

    Requests start in order, `slots` at a time, and each gains one token per step. Prompts count for every
    request of a group, though the radix cache holds them once.
    """
    ends: list[tuple[int, int]] = []  # (step of the last token, request)
    starts: dict[int, int] = {}
    held_at_start, peak, now = 0, 0, 0

    def end_first() -> None:
        nonlocal held_at_start, peak, now
        before, (now, gone) = now, heapq.heappop(ends)
        # All have grown by a token per step since their start; before this end they held most. Others that end at
        # the same step are gone before anything starts in the place of this one.
        if now > before:
            peak = max(peak, held_at_start + (len(ends) + 1) * now)
        held_at_start -= prompt_lengths[gone] - starts.pop(gone)

    for request, (prompt, length) in enumerate(zip(prompt_lengths, lengths, strict=True)):
        if len(ends) == slots:
            end_first()
        starts[request] = now
        held_at_start += prompt - now
        heapq.heappush(ends, (now + length, request))
    while ends:
        end_first()
    return peak
