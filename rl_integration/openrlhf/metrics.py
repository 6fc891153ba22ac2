"""What a training step says about its rollouts, in OpenRLHF's own logging."""

from dataclasses import dataclass, field
from typing import Any

from s3r_sglang.rl_integration.client import PlacedGroup


@dataclass
class Totals:
    """What one server sampled since the last step.

    Attributes:
        rounds, committed: rounds that ended, and tokens that came from them, bonus tokens included.
        by_position: number of rounds in which the draft token at position 1 … k was accepted.
        busy: seconds in which at least one group was in flight.
        kv_peak: highest share of the KV pool in use that was seen, once a second.
        paused_peak: most requests that were seen paused at a time, with their KV in host memory.
        kv_limit: lowest concurrency limit that was seen.
    """

    groups: int = 0
    responses: int = 0
    tokens: int = 0
    truncated: int = 0
    rounds: int = 0
    committed: float = 0.0
    by_position: list[float] = field(default_factory=list)
    busy: float = 0.0
    kv_peak: float = 0.0
    paused_peak: int = 0
    kv_limit: int | None = None
    restarts: int = 0

    def add(self, group: PlacedGroup) -> None:
        """Count a complete group."""
        # Mode direct has rounds without verification.
        rounds = sum(r.rounds for r in group.responses) if group.accept_length is not None else 0
        self.groups += 1
        self.responses += len(group.responses)
        self.tokens += sum(len(response.token_ids) for response in group.responses)
        self.truncated += sum(response.truncated for response in group.responses)
        self.rounds += rounds
        self.committed += rounds * (group.accept_length or 0.0)
        shares = group.acceptance_by_position
        self.by_position = self.by_position or [0.0] * len(shares)
        self.by_position = [a + rounds * b for a, b in zip(self.by_position, shares, strict=True)]

    def observe(self, stats: dict[str, Any]) -> None:
        """Note the state of the KV pool; `stats` is an answer of `/s3r/stats`."""
        for state in stats["acceptance"]:
            if kv := (state or {}).get("kv"):
                self.kv_peak = max(self.kv_peak, kv["utilization"])
                self.paused_peak = max(self.paused_peak, kv["paused"])
                self.kv_limit = min(self.kv_limit or kv["limit"], kv["limit"])


def summary(totals: list[Totals], gpus: int, sync_seconds: float) -> dict[str, float]:
    """The `s3r/…` entries of a step's log, from the totals of all servers, of which the slowest sets the time.

    `accept_length` is tokens per round, bonus token included (τ); `acceptance_i` is the share of rounds in which
    the draft token at position i was accepted. Neither is there if there were no rounds.

    Args:
        gpus: of all servers.
        sync_seconds: time of the last transfer of weights.
    """
    tokens = sum(total.tokens for total in totals)
    rounds = sum(total.rounds for total in totals)
    seconds = max(total.busy for total in totals)
    result = {
        "s3r/rollout_seconds": seconds,
        "s3r/sync_seconds": sync_seconds,
        "s3r/tokens": float(tokens),
        "s3r/tokens_per_second_per_gpu": tokens / seconds / gpus if seconds else 0.0,
        "s3r/groups": float(sum(total.groups for total in totals)),
        "s3r/server_restarts": float(sum(total.restarts for total in totals)),
        "s3r/kv_utilization_peak": max(total.kv_peak for total in totals),
        "s3r/kv_paused_peak": float(max(total.paused_peak for total in totals)),
    }
    if limits := [total.kv_limit for total in totals if total.kv_limit is not None]:
        result["s3r/kv_limit"] = float(min(limits))
    if rounds:
        result["s3r/accept_length"] = sum(total.committed for total in totals) / rounds
        columns = zip(*(total.by_position for total in totals if total.by_position), strict=True)
        result |= {f"s3r/acceptance_{i}": sum(column) / rounds for i, column in enumerate(columns, 1)}
    return result
