"""What `s3r bench` measured and what follows from it; the JSON file is a `Report`.

Derived numbers are computed fields: they are in the file, and can only be what the measurements say.
"""

import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, computed_field

from s3r_sglang.bench import paper
from s3r_sglang.bench.kernel_times import KernelTimes
from s3r_sglang.bench.load import LoadError, Window
from s3r_sglang.metrics import acceptance_by_position

SCHEMA_VERSION = 1


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Throughput(Record):
    """Repeats of one setting with one engine.

    Attributes:
        tokens_per_second: of all requests together, per repeat.
        window_seconds: length of the window it was counted over, per repeat.
    """

    tokens_per_second: tuple[float, ...]
    window_seconds: tuple[float, ...]

    @classmethod
    def of(cls, windows: Sequence[Window]) -> "Throughput":
        return cls(
            tokens_per_second=tuple(window.tokens_per_second for window in windows),
            window_seconds=tuple(window.seconds for window in windows),
        )

    @computed_field
    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)

    @computed_field
    @property
    def range(self) -> tuple[float, float]:
        return min(self.tokens_per_second), max(self.tokens_per_second)

    def step_ms(self, batch_size: int) -> float:
        """Time in which every one of `batch_size` requests gets one token."""
        return 1e3 * batch_size / self.median


class StageTimes(Record):
    """The rounds of a setting with a full batch, by the device's clock, in ms.

    Attributes:
        rounds: how many rounds.
        draft_ms: all k draft steps; median over the rounds, as the other stages.
        verify_ms, sample_ms: the verify forward with the index refresh; acceptance and what follows it.
        round_ms: from the first operation of the worker to its last.
        gap_ms: from the end of a round to the beginning of the next, where the scheduler's own operations run
            and where the device idles if the host is late; the mean, so that rare long ones count.
    """

    rounds: int
    draft_ms: float
    verify_ms: float
    sample_ms: float
    round_ms: float
    gap_ms: float

    @computed_field
    @property
    def gap_share(self) -> float:
        """Share of the time that does not belong to a round."""
        return self.gap_ms / (self.round_ms + self.gap_ms)

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]], batch_size: int, first: int, last: int) -> "StageTimes":
        """Summary of the probe's rows of one setting.

        Args:
            rows: lines of the probe's file, in order.
            batch_size: rounds of other batches are left out, and so are rounds after them: a prefill may lie
                between, which is no gap between rounds.
            first, last: bounds of the mean context of the setting's rounds.

        Raises:
            LoadError: no such rounds.
        """

        def of_setting(row: dict[str, Any]) -> bool:
            return row["batch_size"] == batch_size and first <= row["context"] <= last

        kept = [
            row
            for before, row in itertools.pairwise(rows)
            if of_setting(before) and of_setting(row) and before["context"] < row["context"]
        ]
        if not kept:
            raise LoadError(
                f"the worker timed no rounds of {batch_size} requests at {first} to {last} tokens"
            )
        stages = ("draft_ms", "verify_ms", "sample_ms", "round_ms")
        return cls(
            rounds=len(kept),
            gap_ms=statistics.fmean(row["gap_ms"] for row in kept),
            **{name: statistics.median(row[name] for row in kept) for name in stages},
        )


def read_stage_times(path: Path) -> list[dict[str, Any]]:
    """Rows that the probe has written; a last line that is not complete yet is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Traffic(Record):
    """Predicted bytes of one step, and the rate they imply at its measured time."""

    weight_bytes: int
    kv_bytes: int
    milliseconds: float

    @computed_field
    @property
    def terabytes_per_second(self) -> float:
        return (self.weight_bytes + self.kv_bytes) / self.milliseconds / 1e9


class SettingResult(Record):
    """One (B, S).

    Attributes:
        draft_length: k.
        autoregressive, s3r: throughput of the two engines.
        accept_histogram: accept_histogram[a] counts the rounds that accepted exactly a drafts.
        stages: of S3R's rounds.
        traffic: of an autoregressive, a draft and a verify step.
        kernels: "autoregressive" and "s3r", of a traced run; empty without one.
    """

    batch_size: int
    context: int
    new_tokens: int
    draft_length: int
    autoregressive: Throughput
    s3r: Throughput
    accept_histogram: tuple[int, ...]
    stages: StageTimes
    traffic: dict[str, Traffic]
    kernels: dict[str, KernelTimes] = {}

    @computed_field
    @property
    def speedup(self) -> float:
        """Ratio of the medians."""
        return self.s3r.median / self.autoregressive.median

    @computed_field
    @property
    def speedup_range(self) -> tuple[float, float]:
        """Ratio of the slowest S3R repeat to the fastest autoregressive one, and the other way round."""
        (s3r_low, s3r_high), (ar_low, ar_high) = self.s3r.range, self.autoregressive.range
        return s3r_low / ar_high, s3r_high / ar_low

    @computed_field
    @property
    def tau(self) -> float:
        """Tokens per round and request, bonus included."""
        return 1 + sum(self.acceptance)

    @computed_field
    @property
    def acceptance(self) -> list[float]:
        """P(draft i is accepted), i = 1 … k."""
        return acceptance_by_position(self.accept_histogram, self.draft_length)

    @computed_field
    @property
    def t_p_ms(self) -> float:
        """T_p: an autoregressive step, scheduling included."""
        return self.autoregressive.step_ms(self.batch_size)

    @computed_field
    @property
    def t_q_ms(self) -> float:
        """T_q: a draft step."""
        return self.stages.draft_ms / self.draft_length

    @computed_field
    @property
    def t_v_ms(self) -> float:
        """T_V: the verify forward."""
        return self.stages.verify_ms

    @computed_field
    @property
    def rounds_tokens_per_second(self) -> float:
        """S3R's throughput by the rounds' own clock, B τ / (round + gap): should agree with the client's."""
        return 1e3 * self.batch_size * self.tau / (self.stages.round_ms + self.stages.gap_ms)

    @computed_field
    @property
    def break_even_tau(self) -> float:
        """(k T_q + T_V) / T_p (paper, Eq. 5): τ above which S3R wins by the stages alone."""
        return (self.stages.draft_ms + self.stages.verify_ms) / self.t_p_ms

    @computed_field
    @property
    def break_even_acceptance(self) -> float:
        """α_BE of the paper's Table 7; above one, no acceptance suffices."""
        return (self.break_even_tau - 1) / self.draft_length


class Correctness(Record):
    """Greedy responses of the S3R engine, judged by the autoregressive one.

    Attributes:
        equal_tokens: share of positions where both engines' responses agree, counted up to the first
            difference of each response.
        s3r_logprob_error: mean |logprob reported by S3R - logprob by a dense prefill of the same tokens|.
        ar_logprob_error: the same for the autoregressive engine's own responses: the noise of the dtype.
        informative: false with dummy weights, whose distributions are flat: ties everywhere, and hardly a
            difference between any two logprobs.
    """

    responses: int
    tokens: int
    equal_tokens: float
    s3r_logprob_error: float
    ar_logprob_error: float
    informative: bool

    @computed_field
    @property
    def passed(self) -> bool:
        """S3R's logprobs are as close to the dense policy as autoregressive decoding's own."""
        return self.s3r_logprob_error <= 3 * self.ar_logprob_error + 1e-5


class Report(Record):
    """All of one run of the command."""

    schema_version: int = SCHEMA_VERSION
    created: str
    command: str
    git_commit: str
    machine: dict[str, Any]
    versions: dict[str, str]
    model: dict[str, Any]
    load_format: str
    prompts: str
    sampling: dict[str, Any]
    server_args: dict[str, dict[str, Any]]
    s3r_config: dict[str, Any]
    imposed_acceptance: tuple[float, ...] | None
    correctness: Correctness
    settings: tuple[SettingResult, ...]

    @property
    def title(self) -> str:
        """Names the model, the device, and whether acceptance is imposed."""
        title = f"{self.model['name']} on {self.machine['device']}"
        if self.load_format == "dummy":
            title += ", dummy weights"
        return title + (", IMPOSED ACCEPTANCE" if self.imposed_acceptance else "")

    def paper_speedup(self, result: SettingResult) -> float | None:
        """The paper's speed-up at this setting, if it has one."""
        return paper.SPEEDUPS.get(self.model["name"], {}).get((result.batch_size, result.context))
