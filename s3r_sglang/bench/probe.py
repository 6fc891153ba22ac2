"""What `s3r bench` has SGLang's scheduler process do: time the stages, impose acceptance, end responses.

Plugin and worker import this module only if the environment variable `S3R_BENCH_PROBE` is set. Nothing here
waits for the device: under overlap scheduling a synchronisation in the round would be part of what is measured.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

logger = logging.getLogger(__name__)

PROBE_ENV = "S3R_BENCH_PROBE"
# Beyond the streams of the sampler (s3r_sglang.kernels.reference.philox.Stream), whose noise has been spent.
IMPOSED_STREAM = 1 << 16
PLANNED = "planned-"


class ProbeConfig(BaseModel):
    """The JSON object in `S3R_BENCH_PROBE`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage_times: Path | None = Field(
        default=None, description="File to write, one JSON object per round and line."
    )
    imposed_acceptance: tuple[float, ...] | None = Field(
        default=None,
        description="P(draft i is accepted), i = 1 … k, not conditional on the drafts before it.",
    )
    imposed_from: int = Field(
        default=0, ge=0, description="Rounds that start at a shorter length are left alone."
    )
    planned_ends: bool = Field(
        default=False, description="End a response at the length in its request id, see `planned_rid`."
    )

    @field_validator("imposed_acceptance")
    @classmethod
    def _is_a_survival_function(cls, profile: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if profile is not None:
            chain = [1.0, *profile, 0.0]
            # Not "any later > earlier", which a NaN passes.
            if not profile or not all(earlier >= later for earlier, later in itertools.pairwise(chain)):
                raise ValueError("imposed_acceptance must fall from at most 1 to at least 0 by position")
        return profile


def planned_rid(index: int, length: int) -> str:
    """Id of a request that a process with `planned_ends` ends after `length` tokens."""
    return f"{PLANNED}{length}-{index}"


def end_as_planned(_: None, req: Any, new_accepted_len: int = 1) -> None:
    """After `Req.update_finish_state`: the response is over at its planned length.

    With dummy weights no end token comes, and `max_new_tokens` would tell the scheduler in advance what no
    scheduler of a rollout knows: how long each response will be.
    """
    if req.finished() or not req.rid.startswith(PLANNED):
        return
    length = int(req.rid.removeprefix(PLANNED).split("-")[0])
    if len(req.output_ids) >= length:
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        req.finished_reason, req.finished_len = FINISH_LENGTH(length=length), length


def register_hooks() -> None:
    """Hook what `S3R_BENCH_PROBE` asks for into SGLang, with S3R or without."""
    if ProbeConfig.model_validate_json(os.environ[PROBE_ENV]).planned_ends:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        target = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
        HookRegistry.register(target, end_as_planned, HookType.AFTER)


class Probe:
    """Stage times of every round, and an acceptance profile for models whose weights are not real.

    Args:
        config: what to do.
    """

    def __init__(self, config: ProbeConfig) -> None:
        self.config = config
        self._rounds = _RoundLog(config.stage_times) if config.stage_times else None
        self._profile: torch.Tensor | None = None
        if config.imposed_acceptance:
            logger.warning(
                "IMPOSED ACCEPTANCE %s: responses to requests of %d tokens and more are NOT samples of the "
                "policy; this process is good for measuring time only.",
                list(config.imposed_acceptance),
                config.imposed_from,
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, tp_rank: int = 0) -> Probe | None:
        """The probe that `S3R_BENCH_PROBE` asks for, or None without it.

        Args:
            environ: the process environment.
            tp_rank: all tensor-parallel ranks impose the same acceptance; rank 0 alone writes times.

        Raises:
            pydantic.ValidationError: the variable is not a valid `ProbeConfig`.
        """
        if PROBE_ENV not in environ:
            return None
        config = ProbeConfig.model_validate_json(environ[PROBE_ENV])
        return cls(config if tp_rank == 0 else config.model_copy(update={"stage_times": None}))

    @contextmanager
    def round(self, lengths: torch.Tensor) -> Iterator[None]:
        """Time a whole round; stages inside belong to it.

        Args:
            lengths: [B] integer, the sequence lengths L at the round's start.
        """
        if self._rounds is None:
            yield
            return
        self._rounds.begin(lengths)
        yield
        self._rounds.end()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of the current round on the current stream: "draft", "verify" or "sample"."""
        if self._rounds is None:
            yield
            return
        begin = _event_now(self._rounds.device)
        yield
        self._rounds.add(name, begin)

    def impose(
        self,
        tokens: torch.Tensor,
        accept_lens: torch.Tensor,
        draft_tokens: torch.Tensor,
        seeds: torch.Tensor,
        rounds: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace the outcome of the accept stage by one with the configured acceptance.

        One uniform u per request and round accepts the drafts i with u < a_i, where a_i falls with i. So
        draft i is accepted with probability a_i, and none after a rejected one. The sampler has run before,
        so its cost is in what is measured.

        Args:
            tokens: [B, k + 1] int32, what the sampler emitted, zeros after its last token.
            accept_lens: [B] int32 in 1 … k + 1, bonus token included.
            draft_tokens: [B, k] integer.
            seeds: [B] int64, the requests' seeds.
            rounds: [B] int64, sequence lengths L at the round's start.

        Returns:
            `tokens` and `accept_lens` in the same layout; the arguments themselves if nothing is imposed.
            After the accepted drafts comes the next draft, or the sampler's last token if all are accepted.

        Raises:
            ValueError: the profile does not have k positions.
        """
        if self.config.imposed_acceptance is None:
            return tokens, accept_lens
        k = draft_tokens.shape[1]
        if len(self.config.imposed_acceptance) != k:
            raise ValueError(
                f"imposed_acceptance has {len(self.config.imposed_acceptance)} positions, not {k}"
            )
        if self._profile is None:
            self._profile = torch.tensor(self.config.imposed_acceptance, device=tokens.device)
        accepted = (_uniforms(seeds, rounds)[:, None] < self._profile).sum(dim=1, dtype=accept_lens.dtype)
        last = tokens.gather(1, (accept_lens - 1).long()[:, None])
        chain = torch.cat([draft_tokens.to(tokens.dtype), last], dim=1)
        behind = torch.arange(k + 1, device=tokens.device) > accepted[:, None]
        imposed = rounds >= self.config.imposed_from
        return (
            torch.where(imposed[:, None], chain.masked_fill(behind, 0), tokens),
            torch.where(imposed, accepted + 1, accept_lens),
        )


def _uniforms(seeds: torch.Tensor, rounds: torch.Tensor) -> torch.Tensor:
    """[B] float32 in [0, 1)."""
    from s3r_sglang.kernels.reference import philox as reference

    if seeds.is_cuda:
        from s3r_sglang.kernels.ops.philox import random_words
    else:
        random_words = reference.random_words
    # A tensor for the step: moving the number 0 to the device would wait for the stream.
    words = random_words(seeds, rounds.contiguous(), torch.zeros_like(seeds), IMPOSED_STREAM, 1)
    return reference.coins(words[:, 0])


class _HostEvent:
    """`torch.cuda.Event` for a device that works in step with the host."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end.seconds - self.seconds) * 1e3


def _event_now(device: torch.device) -> Any:
    """An event recorded on the current stream of `device`."""
    event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _HostEvent()
    event.record()
    return event


@dataclass
class _Round:
    """A round whose events the device may not have reached yet.

    Fields:
        total_length: [1] int64 on the host (pinned), the sum of L over the batch; valid once `end` is reached.
    """

    batch_size: int
    total_length: torch.Tensor
    begin: Any
    end: Any = None
    stages: dict[str, tuple[Any, Any]] = field(default_factory=dict)


class _RoundLog:
    """Writes a line per round as soon as the device has finished it.

    A line goes to the file at once: SGLang kills its scheduler processes, so nothing runs at their exit.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._pending: deque[_Round] = deque()
        self._current: _Round | None = None
        self._last_end: Any = None
        self.device = torch.device("cpu")

    def begin(self, lengths: torch.Tensor) -> None:
        self.device = lengths.device
        begin = _event_now(self.device)
        total = torch.empty(1, dtype=torch.int64, pin_memory=lengths.is_cuda)
        total.copy_(lengths.sum(), non_blocking=True)
        self._current = _Round(lengths.shape[0], total, begin)

    def add(self, name: str, begin: Any) -> None:
        if self._current is None:
            raise RuntimeError(f"stage {name!r} is outside a round")
        self._current.stages[name] = (begin, _event_now(self.device))

    def end(self) -> None:
        assert self._current is not None
        self._current.end = _event_now(self.device)
        self._pending.append(self._current)
        self._current = None
        while self._pending and self._pending[0].end.query():
            self._write(self._pending.popleft())

    def _write(self, done: _Round) -> None:
        row = {
            "batch_size": done.batch_size,
            "context": done.total_length.item() / done.batch_size,
            "round_ms": done.begin.elapsed_time(done.end),
            "gap_ms": self._last_end.elapsed_time(done.begin) if self._last_end else None,
            **{f"{name}_ms": begin.elapsed_time(end) for name, (begin, end) in done.stages.items()},
        }
        self._last_end = done.end
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
