"""Totals of the rollout service since the start, for `/s3r/stats` and `/metrics`."""

import itertools
import os
import time
from collections import deque
from typing import Any

from s3r_sglang.server.protocol import Group, GroupError

# Rates and the retry hint look back this far.
WINDOW_SECONDS = 60.0


class Stats:
    """Counts finished groups; its numbers are those of the groups that clients got."""

    def __init__(self) -> None:
        self.groups = 0
        self.errors = 0
        self.responses = 0
        self.tokens = 0
        self._recent: deque[tuple[float, int, float]] = deque()
        # Set by SGLang, for all its processes, if it runs with --enable-metrics.
        self._exported = _Exported() if "PROMETHEUS_MULTIPROC_DIR" in os.environ else None

    def in_flight(self, groups: int) -> None:
        """Note the number of groups in flight, whenever it changes."""
        if self._exported is not None:
            self._exported.in_flight.set(groups)

    def add(self, result: Group | GroupError, seconds: float) -> None:
        """Count one finished group that took `seconds`."""
        if self._exported is not None:
            self._exported.add(result)
        if isinstance(result, GroupError):
            self.errors += 1
            return
        tokens = sum(len(response.token_ids) for response in result.responses)
        self.groups += 1
        self.responses += len(result.responses)
        self.tokens += tokens
        self._recent.append((time.monotonic(), tokens, seconds))
        self._forget()

    def _forget(self) -> None:
        oldest = time.monotonic() - WINDOW_SECONDS
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()

    def retry_after(self) -> int:
        """Seconds after which a refused client may try again: about one group's time, 1 … 60."""
        self._forget()
        times = [seconds for *_, seconds in itertools.islice(reversed(self._recent), 32)]
        return round(min(60.0, max(1.0, sum(times) / len(times)))) if times else 1

    def summary(self) -> dict[str, Any]:
        """Totals, and tokens per second of the groups that ended within the last minute."""
        self._forget()
        return {
            "groups": self.groups,
            "errors": self.errors,
            "responses": self.responses,
            "tokens": self.tokens,
            "tokens_per_second": sum(tokens for _, tokens, _ in self._recent) / WINDOW_SECONDS,
        }


class _Exported:
    """Prometheus series in the default registry, where SGLang's own are."""

    def __init__(self) -> None:
        # Imported late: the client chooses its multi-process mode by PROMETHEUS_MULTIPROC_DIR on import.
        from prometheus_client import Counter, Gauge

        self._groups = Counter("s3r_groups", "Finished groups by type: group or error.", ["type"])
        self._tokens = Counter("s3r_rollout_tokens", "Response tokens of complete groups.")
        self.in_flight = Gauge("s3r_groups_in_flight", "Groups in flight.", multiprocess_mode="livesum")

    def add(self, result: Group | GroupError) -> None:
        self._groups.labels(type=result.type).inc()
        if isinstance(result, Group):
            self._tokens.inc(sum(len(response.token_ids) for response in result.responses))
