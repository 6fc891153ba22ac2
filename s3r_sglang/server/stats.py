"""Totals of the rollout service since the start, for `/s3r/stats`."""

import itertools
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

    def add(self, result: Group | GroupError, seconds: float) -> None:
        """Count one finished group that took `seconds`."""
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
