"""Acceptance statistics: per request in `meta_info`, in total in `/server_info` and `/metrics`.

SGLang's own `spec_accept_length` divides all output tokens by the rounds. The first output token comes from
the prefill and the last block may be cut off by a stop token, so it is off by about one token per response;
`s3r_accept_length` is what a round verified and accepted: one plus the accepted drafts, those past the end of a
response included. It describes the draft, whatever the length of the response.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from s3r_sglang.config import S3RConfig


def acceptance_by_position(histogram: Sequence[int], draft_length: int) -> list[float]:
    """P(the draft token at position i is accepted), i = 1 … `draft_length`, unconditional on the ones before.

    Args:
        histogram: histogram[a] is the number of rounds that accepted exactly a drafts; may be shorter than
            `draft_length` + 1.
        draft_length: k.
    """
    rounds = sum(histogram)
    return [sum(histogram[i:]) / rounds if rounds else 0.0 for i in range(1, draft_length + 1)]


def request_metrics(config: S3RConfig, histogram: Sequence[int], context: int) -> dict[str, Any]:
    """The `s3r_*` entries of a response's `meta_info`.

    Mode direct accepts nothing and rejects nothing, so it reports no acceptance.

    Args:
        config: effective configuration.
        histogram: rounds by number of accepted drafts.
        context: prompt and output tokens so far.
    """
    rounds = sum(histogram)
    entries: dict[str, Any] = {
        "s3r_faithful": config.faithful,
        "s3r_rounds": rounds,
        "s3r_budget": config.budget(context),
    }
    if config.faithful and rounds:
        accepted = sum(a * count for a, count in enumerate(histogram))
        entries["s3r_accept_length"] = 1 + accepted / rounds
        entries["s3r_acceptance_by_position"] = acceptance_by_position(histogram, config.draft_length)
    return entries


class RoundMetrics:
    """Totals of one scheduler process, from values that SGLang has already copied to the CPU.

    Counts every round that ran. Under overlap scheduling that includes the one in flight when a request
    turns out to be finished, which the request's own statistics leave out.

    Args:
        config: effective configuration.
        enabled: whether this process reports to `/metrics`; one rank per replica should. It then does if
            SGLang runs with --enable-metrics, which sets PROMETHEUS_MULTIPROC_DIR for all its processes.
    """

    def __init__(self, config: S3RConfig, enabled: bool = True) -> None:
        self.config = config
        self.histogram = [0] * (config.draft_length + 1)
        export = enabled and "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._exported = _Exported(config.draft_length) if export else None

    def record(self, accepted_drafts: Sequence[int]) -> None:
        """Add one round of a batch, given the number of accepted drafts of each request."""
        batch = [0] * len(self.histogram)
        for accepted in accepted_drafts:
            batch[accepted] += 1
        self.histogram = [total + new for total, new in zip(self.histogram, batch, strict=True)]
        if self._exported is not None:
            self._exported.add(batch, self.accept_length if self.config.faithful else None)

    @property
    def tokens(self) -> int:
        """Tokens that rounds have committed since the start."""
        return sum((1 + a) * count for a, count in enumerate(self.histogram))

    @property
    def accept_length(self) -> float:
        """Tokens per round and request since the start, bonus token included (τ of the paper)."""
        rounds = sum(self.histogram)
        accepted = sum(a * count for a, count in enumerate(self.histogram))
        return 1 + accepted / rounds if rounds else 0.0

    def summary(self) -> dict[str, Any]:
        """What `/server_info` shows."""
        rounds, k = sum(self.histogram), self.config.draft_length
        by_position = acceptance_by_position(self.histogram, k)
        counted = {"rounds": rounds, "draft_tokens": rounds * k}
        if not self.config.faithful:
            return counted
        return counted | {
            "accept_length": self.accept_length,
            "accept_rate": sum(by_position) / k,
            "acceptance_by_position": by_position,
        }


class _Exported:
    """Prometheus series in the default registry, where SGLang's own are."""

    def __init__(self, draft_length: int) -> None:
        # Imported late: the client chooses its multi-process mode by PROMETHEUS_MULTIPROC_DIR on import.
        from prometheus_client import Counter, Gauge

        self.draft_length = draft_length
        self.rounds = Counter("s3r_rounds", "Rounds, summed over requests.")
        self.drafted = Counter("s3r_draft_tokens", "Drafted tokens.")
        accepted = Counter("s3r_accepted_tokens", "Accepted draft tokens by position.", ["position"])
        self.accepted = [accepted.labels(position=str(i + 1)) for i in range(draft_length)]
        self.accept_length = Gauge(
            "s3r_accept_length",
            "Tokens per round and request since the start, bonus token included.",
            multiprocess_mode="mostrecent",
        )

    def add(self, batch: Sequence[int], accept_length: float | None) -> None:
        """Add one round of a batch; without an accept length, nothing was verified."""
        rounds = sum(batch)
        self.rounds.inc(rounds)
        self.drafted.inc(rounds * self.draft_length)
        if accept_length is None:
            return
        for position, counter in enumerate(self.accepted, start=1):
            counter.inc(sum(batch[position:]))
        self.accept_length.set(accept_length)


_KV_GAUGES = {
    "limit": "Requests that may be active (C).",
    "active": "Active requests.",
    "paused": "Paused requests whose KV is in host memory.",
    "waiting": "Requests that have not started.",
    "utilization": "Share of the KV pool that requests hold.",
    "host_pages_used": "Pages of host memory in use.",
    "host_pages_peak": "Pages of host memory in use at most so far.",
}
_KV_COUNTERS = {
    "pauses": "Offload episodes.",
    "repauses": "Offload episodes of requests paused before.",
    "pages_out": "Pages copied to host memory.",
    "pages_in": "Pages copied from host memory.",
    "recomputed": "Requests prefilled again.",
    "restores": "Restorations.",
    "restore_seconds": "Sum of restoration latencies.",
    "tokens": "Tokens that rounds have committed.",
}


class KVMetrics:
    """`/metrics` of a replica's KV scheduling, labelled by its data-parallel rank.

    Args:
        replica: data-parallel rank.
        enabled: as for `RoundMetrics`.
    """

    def __init__(self, replica: int, enabled: bool = True) -> None:
        self.enabled = enabled and "PROMETHEUS_MULTIPROC_DIR" in os.environ
        if not self.enabled:
            return
        from prometheus_client import Counter, Gauge

        label = ["replica"]
        self._gauges = {
            name: Gauge(f"s3r_kv_{name}", text, label, multiprocess_mode="mostrecent").labels(replica)
            for name, text in _KV_GAUGES.items()
        }
        self._counters = {
            name: Counter(f"s3r_kv_{name}", text, label).labels(replica)
            for name, text in _KV_COUNTERS.items()
        }
        self._shown = dict.fromkeys(_KV_COUNTERS, 0.0)

    def show(self, stats: Mapping[str, Any]) -> None:
        """Take over the fields of a `KVStats`."""
        for name, gauge in self._gauges.items():
            gauge.set(stats[name])
        for name, counter in self._counters.items():
            counter.inc(stats[name] - self._shown[name])
            self._shown[name] = stats[name]
