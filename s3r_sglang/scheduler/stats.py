"""What one replica's KV scheduling has done so far; see `KVStats`."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KVStats:
    """State and totals of a replica's KV scheduling, for `/server_info`, `/metrics`, the log and traces.

    A page is the KV of one token (SGLang's page size 1). Totals count since the start of the process.

    Fields, state at this moment:
        policy: "recompute", "offload" or "aimd".
        limit: C, requests that may be active.
        active: requests in the running batch, those being restored included.
        paused: requests whose KV is in host memory and not on its way back (the backlog O).
        waiting: requests that have not started, or start again.
        utilization: share of the KV pool that requests hold, in [0, 1]; prefixes that nobody uses do not count.
        host_pages_used, host_pages_peak, host_pages_capacity: of the host pool, in pages; a request holds whole
            blocks of it.
        seconds: `time.time()` of the observation.
    Totals:
        pauses: offload episodes.
        repauses: episodes of a request that had been paused before.
        pages_out, pages_in: pages copied to and from host memory.
        recomputed: requests that had to give up their KV because no host memory, or no other way on, was left.
        restores, restore_seconds: restorations and the sum of their latencies, from the allocation of pages until
            the request is back in the batch.
        tokens: tokens that rounds have committed, those behind the end of a response included.
        rounds, prefills: batches formed to decode, and to prefill.
    """

    policy: str
    limit: int
    active: int = 0
    paused: int = 0
    waiting: int = 0
    utilization: float = 0.0
    host_pages_used: int = 0
    host_pages_peak: int = 0
    host_pages_capacity: int = 0
    seconds: float = field(default_factory=time.time)
    pauses: int = 0
    repauses: int = 0
    pages_out: int = 0
    pages_in: int = 0
    recomputed: int = 0
    restores: int = 0
    restore_seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    prefills: int = 0

    @property
    def pages_per_1000_tokens(self) -> float:
        """Pages moved in both directions per 1,000 committed tokens (paper, table 2)."""
        return 1000 * (self.pages_out + self.pages_in) / self.tokens if self.tokens else 0.0

    def line(self) -> str:
        """One line for the log."""
        latency = 1000 * self.restore_seconds / self.restores if self.restores else 0.0
        return (
            f"{self.policy}, limit {self.limit}, active {self.active}, paused {self.paused}, "
            f"waiting {self.waiting}, "
            f"utilization {self.utilization:.2f}, pauses {self.pauses} ({self.repauses} again), "
            f"pages moved per 1,000 tokens {self.pages_per_1000_tokens:.1f}, "
            f"host pages {self.host_pages_used} (peak {self.host_pages_peak} of {self.host_pages_capacity}), "
            f"recomputed {self.recomputed}, restore {latency:.0f} ms"
        )
