"""What `s3r bench-kv` measured and what follows from it; the JSON file is a `KvReport`."""

from fractions import Fraction
from typing import Any

from pydantic import computed_field

from s3r_sglang.bench import paper
from s3r_sglang.bench.records import Record
from s3r_sglang.metrics import acceptance_by_position

KV_SCHEMA_VERSION = 1


class Variant(Record):
    """A row of the ablation.

    Attributes:
        policy: of `--s3r-kv-policy`; None for autoregressive decoding.
        share: of the slots that may be active at a time.
        headroom: whether the default of `--s3r-kv-headroom` holds. Without, a request is admitted or restored as
            soon as the next round fits, which is the paper's check.
    """

    policy: str | None
    share: Fraction = Fraction(1)
    headroom: bool = True

    def limit(self, slots: int) -> int:
        """Most active requests, given the slots of the engine."""
        return max(1, int(self.share * slots))

    def title(self, slots: int) -> str:
        """As the paper's Table 2 has it: "Offload-128", and "AIMD" without a number."""
        if self.policy is None:
            return "AR"
        if self.policy == "aimd":
            return "AIMD"
        title = f"{self.policy.capitalize()}-{self.limit(slots)}"
        return f"{title}, headroom" if self.policy == "offload" and self.headroom else title


# The paper's rows, with 128 and 160 of 256 slots for the two low limits, and one more: what headroom does alone.
VARIANTS = {
    "ar": Variant(policy=None),
    "recompute": Variant(policy="recompute"),
    "offload-low": Variant(policy="offload", share=Fraction(1, 2), headroom=False),
    "offload-mid": Variant(policy="offload", share=Fraction(5, 8), headroom=False),
    "offload": Variant(policy="offload", headroom=False),
    "offload-headroom": Variant(policy="offload"),
    "aimd": Variant(policy="aimd"),
}


class KvJob(Record):
    """All that two runs must have in common to be rows of one table; see `s3r bench-kv --help`.

    Attributes:
        longest, median: tokens of a response; without a median, it is `workload.MEDIAN_SHARE` of the longest.
        pool_tokens: size of the KV pool, derived from the others.
        peak_demand: tokens that full slots would hold at most if memory were unlimited.
        tokens: of all responses.
    """

    model: str
    load_format: str
    dtype: str | None
    engine_argv: tuple[str, ...]
    imposed_acceptance: tuple[float, ...] | None
    prompts: str
    requests: int
    group_size: int
    slots: int
    prompt_length: int
    longest: int
    median: int | None = None
    pressure: float
    seed: int
    pool_tokens: int
    peak_demand: int
    tokens: int
    kv_bytes_per_token: int


class KvSample(Record):
    """The scheduler at a moment, `seconds` after the first request was sent; see `KVStats`.

    Attributes:
        rounds, prefills, pauses: since the process started; 0 in reports that do not have them yet.
    """

    seconds: float
    limit: int
    active: int
    paused: int
    waiting: int
    utilization: float
    rounds: int = 0
    prefills: int = 0
    pauses: int = 0


class KvTotals(Record):
    """Of one rollout, see `s3r_sglang.scheduler.stats.KVStats`."""

    pauses: int
    repauses: int
    pages_out: int
    pages_in: int
    recomputed: int
    restores: int
    restore_seconds: float
    host_pages_peak: int
    host_pages_capacity: int
    rounds: int = 0
    prefills: int = 0

    @computed_field
    @property
    def restore_ms(self) -> float:
        """Mean latency of a restoration; 0 without one."""
        return 1e3 * self.restore_seconds / self.restores if self.restores else 0.0


class KvRun(Record):
    """One rollout with one variant.

    Attributes:
        variant: key in VARIANTS.
        seconds: from the first request sent to the last response received.
        tokens: of all responses, each checked to have exactly its length.
        retractions: times that SGLang dropped a request's KV and prefilled it again.
        accept_histogram: rounds by accepted drafts; empty for autoregressive decoding.
        logprob_error: mean |reported logprob - logprob by a dense prefill| over `checked` responses, None with
            dummy weights.
        kv: None for autoregressive decoding.
    """

    variant: str
    title: str
    created: str
    git_commit: str
    seconds: float
    requests: int
    tokens: int
    retractions: int
    accept_histogram: tuple[int, ...] = ()
    checked: int = 0
    logprob_error: float | None = None
    kv: KvTotals | None = None
    samples: tuple[KvSample, ...] = ()
    s3r_config: dict[str, Any]

    @computed_field
    @property
    def tokens_per_second(self) -> float:
        """Generation throughput: rollout time in the denominator (paper, section C.3)."""
        return self.tokens / self.seconds

    @computed_field
    @property
    def tau(self) -> float | None:
        """Tokens per round and request."""
        if not self.accept_histogram:
            return None
        return 1 + sum(acceptance_by_position(self.accept_histogram, len(self.accept_histogram) - 1))

    @computed_field
    @property
    def pages_per_1000_tokens(self) -> float | None:
        """Pages (of one token) copied in both directions per 1,000 response tokens."""
        if self.kv is None:
            return None
        return 1000 * (self.kv.pages_out + self.kv.pages_in) / self.tokens


class KvReport(Record):
    """All of one ablation; rows may come from several runs of the command with the same job."""

    schema_version: int = KV_SCHEMA_VERSION
    created: str
    command: str
    git_commit: str
    machine: dict[str, Any]
    versions: dict[str, str]
    job: KvJob
    runs: dict[str, KvRun]

    @property
    def title(self) -> str:
        """Names the model, the device, and whether acceptance is imposed."""
        title = f"{self.job.model} on {self.machine['device']}"
        if self.job.load_format == "dummy":
            title += ", dummy weights"
        return title + (", IMPOSED ACCEPTANCE" if self.job.imposed_acceptance else "")

    @property
    def rows(self) -> list[KvRun]:
        """The runs in the paper's order."""
        return [self.runs[key] for key in VARIANTS if key in self.runs]

    def ratio(self, key: str, to: str) -> float | None:
        """Throughput of one variant over that of another; None if one was not run."""
        if key not in self.runs or to not in self.runs:
            return None
        return self.runs[key].tokens_per_second / self.runs[to].tokens_per_second

    @computed_field
    @property
    def findings(self) -> dict[str, float | None]:
        """The relations that the paper's section 6.5 states, as measured here."""
        return {name: self.ratio(*pair) for name, pair in paper.KV_RELATIONS.items()} | {
            "pages of offload / pages of aimd": self._page_ratio()
        }

    def _page_ratio(self) -> float | None:
        offload, aimd = (
            self.runs[key].pages_per_1000_tokens if key in self.runs else None for key in ("offload", "aimd")
        )
        return offload / aimd if offload is not None and aimd else None

    @property
    def faults(self) -> list[str]:
        """Variants whose logprobs are farther from the dense policy's than autoregressive decoding's own."""
        reference = self.runs["ar"].logprob_error if "ar" in self.runs else None
        if reference is None:
            return []
        bound = 3 * reference + 1e-5
        return [
            f"{run.title}: mean logprob error {run.logprob_error:.1e}, autoregressive {reference:.1e}"
            for run in self.rows
            if run.logprob_error is not None and run.logprob_error > bound
        ]
