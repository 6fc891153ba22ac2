"""Whom to pause, restore and admit (arXiv 2610.13202, section B.2), given what the KV pool holds.

Decisions depend on counts alone, never on time, so that all tensor-parallel ranks take the same ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from s3r_sglang.scheduler.aimd import AimdPolicy
from s3r_sglang.scheduler.pager import Pager, Paused
from s3r_sglang.scheduler.stats import KVStats
from s3r_sglang.sglang_symbols import Req

logger = logging.getLogger(__name__)

# Requests start together, as many as this part of the limit: 5 of 160, 8 of 256. In a simulation with the costs
# of a 1.7B model on an H200 (1,024 responses, 4 to 9 ms a prefill forward), AIMD then prefills a third as often
# and takes 1 to 3% less time.
START_TOGETHER = 32


class KVScheduler:
    """Requests whose KV is away, and the concurrency limit of one replica.

    Args:
        pager: moves KV.
        limit: the fixed limit, or the policy that sets it.
        reserve: pages that SGLang reserves for a request ahead of its KV, 2 (k + 1).
        headroom: pages that must be free for requests to grow into, before one more is admitted or restored.
        recompute: releases all of a request's memory and queues it to be prefilled again.

    Attributes:
        paused: in the order in which they were paused, which is that of restoration.
        restoring: on their way back, in the order of their copies.
    """

    def __init__(
        self,
        pager: Pager,
        limit: int | AimdPolicy,
        reserve: int,
        headroom: int,
        recompute: Callable[[Req], None],
    ) -> None:
        self.pager = pager
        self.reserve = reserve
        self.headroom = headroom
        self.paused: list[Paused] = []
        self.restoring: list[Paused] = []
        self._policy = limit
        self._recompute = recompute
        self._pauses = self._repauses = self._pages_out = self._pages_in = self._restores = 0
        self._restore_seconds = 0.0

    @property
    def limit(self) -> int:
        """C: requests that may be active."""
        return self._policy if isinstance(self._policy, int) else self._policy.limit

    @property
    def away(self) -> list[Paused]:
        """Requests in flight that are in no batch."""
        return self.paused + self.restoring

    def fits(self, active: Sequence[Req]) -> bool:
        """Whether SGLang can reserve the pages of a round for all of `active`."""
        return sum(map(self._missing, active)) <= self.pager.free_pages

    def make_room(self, active: Sequence[Req]) -> list[Req]:
        """Pause until a round of the rest fits, those with the least KV first; never the last one.

        Where that is not enough, because prefixes of paused requests fill the pool, paused requests give them up.

        Args:
            active: requests between two rounds: no result of theirs may be in flight.

        Returns:
            The requests that left `active`.
        """
        remaining = list(active)
        # One that is about to be aborted runs once more and frees all it has.
        victims = sorted((req for req in active if req.to_finish is None), key=lambda r: -r.kv_committed_len)
        removed = []
        while not self.fits(remaining):
            if victims and len(remaining) > 1:
                victim = victims.pop()
                remaining.remove(victim)
                removed.append(victim)
                self._pause(victim)
            elif self.away:
                self.give_up((self.paused or self.restoring)[-1])
            else:
                break
        return removed

    def restore(self, active: Sequence[Req]) -> None:
        """Begin to restore paused requests, oldest first, as far as limit and memory allow.

        If nothing is active, the oldest one must come back; the newest give up what they still hold until it can.
        """
        while self.paused:
            oldest, others = self.paused[0], [*active, *(paused.req for paused in self.restoring)]
            if len(others) >= self.limit:
                return
            growth = self.growth([*others, oldest.req]) if others else self.reserve
            if oldest.num_pages + growth <= self.pager.free_pages:
                self.paused.pop(0)
                self.pager.begin_restore(oldest)
                self.restoring.append(oldest)
            elif others:
                return
            else:
                self.give_up(self.paused[-1])

    def copied(self) -> int:
        """How many of `restoring`, from the first, have their KV back."""
        return next(
            (i for i, one in enumerate(self.restoring) if not self.pager.copied(one)), len(self.restoring)
        )

    def rejoin(self, count: int) -> list[Req]:
        """Hand over the first `count` of `restoring`, whose KV is back, to be decoded."""
        back, self.restoring = self.restoring[:count], self.restoring[count:]
        for restored in back:
            self.pager.end_restore(restored)
            self._restores += 1
            self._pages_in += restored.num_pages
            self._restore_seconds += time.perf_counter() - restored.began
        return [restored.req for restored in back]

    def room_to_grow(self, count: int) -> int:
        """Pages for each of `count` active requests to grow into: a round at least."""
        return max(self.reserve, self.headroom // max(1, count))

    def growth(self, requests: Sequence[Req]) -> int:
        """Pages that must be free for `requests` to go on, no more than they can use."""
        room = self.room_to_grow(len(requests))
        left = (req.sampling_params.max_new_tokens - len(req.output_ids) for req in requests)
        return sum(min(room, max(0, tokens) + self.reserve) for tokens in left)

    def admissible(self, active: int, waiting: int) -> int:
        """How many of `waiting` requests may start besides `active` ones: restoration comes first.

        None until some can start together. Where the limit binds, each response that ends would let one request
        in, and every prefill keeps all others waiting for the launches of a forward.
        """
        allowed = 0 if self.away else max(0, self.limit - active)
        return allowed if allowed >= min(waiting, self.limit // START_TOGETHER) else 0

    def update_limit(self) -> None:
        """Apply the policy once, after a decode batch was formed."""
        if not isinstance(self._policy, int):
            self._policy.update(self.utilization, len(self.paused))

    @property
    def utilization(self) -> float:
        """Share of the KV pool that requests hold."""
        return min(1.0, max(0.0, 1 - self.pager.free_pages / self.pager.total_pages))

    def remove(self, gone: Paused) -> Req:
        """Forget a paused request and its KV; its slot and locked prefix are left to the caller."""
        (self.paused if gone in self.paused else self.restoring).remove(gone)
        self.pager.drop(gone)
        return gone.req

    def give_up(self, gone: Paused) -> None:
        """Let a paused request be prefilled again."""
        logger.warning("S3R: request %s loses its KV and will be recomputed.", gone.req.rid)
        self._recompute(self.remove(gone))

    def stats(self, policy: str, active: int, waiting: int, **totals: int) -> KVStats:
        """With the fields of `KVStats` that others count: `recomputed`, `tokens`, `rounds`, `prefills`."""
        block = self.pager.host.block_tokens
        return KVStats(
            policy=policy,
            limit=self.limit,
            active=active + len(self.restoring),
            paused=len(self.paused),
            waiting=waiting,
            utilization=self.utilization,
            host_pages_used=block * self.pager.host.used,
            host_pages_peak=block * self.pager.host.peak,
            host_pages_capacity=block * self.pager.host.num_blocks,
            pauses=self._pauses,
            repauses=self._repauses,
            pages_out=self._pages_out,
            pages_in=self._pages_in,
            restores=self._restores,
            restore_seconds=self._restore_seconds,
            **totals,
        )

    def _pause(self, req: Req) -> None:
        paused = self.pager.pause(req)
        if paused is None:
            logger.warning(
                "S3R: the host pool is full; request %s will be recomputed. --s3r-kv-host-gb enlarges it.",
                req.rid,
            )
            self._recompute(req)
            return
        self.paused.append(paused)
        self._pauses += 1
        self._pages_out += paused.num_pages
        self._repauses += getattr(req, "s3r_paused", False)
        req.s3r_paused = True

    def _missing(self, req: Req) -> int:
        """Pages that SGLang allocates to this request for its next round."""
        return max(0, req.kv_committed_len + self.reserve - req.kv.kv_allocated_len)
