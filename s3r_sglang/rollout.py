"""Offline rollouts: complete groups of responses for a file of prompts, and what they cost."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from s3r_sglang.metrics import acceptance_by_position
from s3r_sglang.prompts import EncodedPrompt
from s3r_sglang.requests import seed_of_sample
from s3r_sglang.scheduler.stats import KVStats
from s3r_sglang.server.protocol import group_seed

WARM_UP_TOKENS = 16


class RolloutError(RuntimeError):
    """The engine did not finish a response."""


@dataclass(frozen=True)
class Job:
    """What to generate.

    Attributes:
        prompts: the prompts, in the order in which they are started.
        group_size: responses per prompt.
        sampling: sampling parameters of SGLang, without a seed.
        seed: responses are a function of it, of the prompt's place in the file and of the group index: the ones
            that `/s3r/rollout` gives for the same prompts and seed. A prompt's own seed wins.
        concurrency: responses in progress at any time.
    """

    prompts: list[EncodedPrompt]
    group_size: int
    sampling: dict[str, Any]
    seed: int = 0
    concurrency: int = 256

    def seed_of(self, prompt: int, sample: int) -> int:
        """Non-negative 63-bit seed of one response; independent of the group size."""
        own = self.prompts[prompt].seed
        return seed_of_sample(group_seed(self.seed, prompt) if own is None else own, sample)

    def sampling_of(self, prompt: int, sample: int) -> dict[str, Any]:
        """Sampling parameters of one response, seed and length limit included."""
        limit = self.prompts[prompt].max_new_tokens or self.sampling["max_new_tokens"]
        return {**self.sampling, "max_new_tokens": limit, "sampling_seed": self.seed_of(prompt, sample)}


@dataclass(frozen=True)
class Response:
    """One row of the output file.

    `rounds` is null without speculation, `accept_length` without verification. `faithful` says whether the
    response has the dense policy's law; if not (mode direct), `logprobs` are those of the sparse policy.
    """

    prompt_id: str | int
    group_index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    logprobs: list[float]
    finish_reason: str
    rounds: int | None
    accept_length: float | None
    faithful: bool
    metadata: dict[str, Any] | None


@dataclass
class Summary:
    """Totals of a job.

    Attributes:
        histogram: histogram[a] counts the rounds that accepted exactly a drafts.
        kv: KV scheduling of each replica, since it started; see `kv_stats`.
    """

    responses: int = 0
    tokens: int = 0
    seconds: float = 0.0
    histogram: list[int] = field(default_factory=list)
    kv: list[KVStats] = field(default_factory=list)

    def add(self, response: Response, histogram: list[int]) -> None:
        """Count one finished response."""
        self.responses += 1
        self.tokens += len(response.token_ids)
        self.histogram += [0] * (len(histogram) - len(self.histogram))
        for accepted, rounds in enumerate(histogram):
            self.histogram[accepted] += rounds

    @property
    def rounds(self) -> int:
        """Verification rounds, summed over responses."""
        return sum(self.histogram)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all responses per second of generation."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def accept_length(self) -> float | None:
        """τ: tokens that a round emits, bonus token included; None without speculation."""
        if not self.rounds:
            return None
        return 1 + sum(accepted * rounds for accepted, rounds in enumerate(self.histogram)) / self.rounds

    def acceptance(self, draft_length: int) -> list[float]:
        """P(draft token i is accepted), i = 1 … draft_length."""
        return acceptance_by_position(self.histogram, draft_length)


def run(
    engine: Any,
    job: Job,
    out: IO[str] | None = None,
    on_response: Callable[[Response], None] | None = None,
) -> Summary:
    """Generate all groups of `job` with a running `sgl.Engine`.

    Args:
        engine: the engine; its event loop is used, so call this from outside a running loop.
        job: what to generate.
        out: takes one JSON line per response. The lines of a group are written together once the group is
            complete, groups in the order in which they complete.
        on_response: called for each finished response.

    Raises:
        RolloutError: the engine aborted a response; the group it belongs to is not written.
    """
    engine.loop.run_until_complete(_warm_up(engine, job))
    summary = Summary()
    start = time.perf_counter()
    try:
        engine.loop.run_until_complete(_generate(engine, job, summary, out, on_response or (lambda _: None)))
    except* RolloutError as failures:
        raise _first(failures) from None
    summary.seconds = time.perf_counter() - start
    return summary


def kv_stats(engine: Any) -> list[KVStats]:
    """KV scheduling of each replica of a running `sgl.Engine`; none without self-sparse decoding."""
    states = engine.get_server_info()["internal_states"]
    return [KVStats(**state["s3r"]["kv"]) for state in states if "s3r" in state]


def _first(failure: BaseException) -> BaseException:
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


async def _warm_up(engine: Any, job: Job) -> None:
    """One short request, so that kernels are compiled before the clock starts; its KV is dropped again."""
    sampling = {**job.sampling, "max_new_tokens": min(WARM_UP_TOKENS, job.sampling["max_new_tokens"])}
    await engine.async_generate(input_ids=job.prompts[0].token_ids, sampling_params=sampling)
    await engine.tokenizer_manager.flush_cache()


async def _generate(
    engine: Any, job: Job, summary: Summary, out: IO[str] | None, on_response: Callable[[Response], None]
) -> None:
    slots = asyncio.Semaphore(job.concurrency)

    async def respond(prompt: int, sample: int) -> Response:
        async with slots:
            response, histogram = await _respond(engine, job, prompt, sample)
        summary.add(response, histogram)
        on_response(response)
        return response

    async def group(prompt: int) -> None:
        async with asyncio.TaskGroup() as samples:
            tasks = [samples.create_task(respond(prompt, sample)) for sample in range(job.group_size)]
        if out is not None:
            rows = [json.dumps(asdict(task.result()), ensure_ascii=False) for task in tasks]
            out.write("\n".join(rows) + "\n")
            out.flush()

    async with asyncio.TaskGroup() as groups:
        for prompt in range(len(job.prompts)):
            groups.create_task(group(prompt))


async def _respond(engine: Any, job: Job, prompt: int, sample: int) -> tuple[Response, list[int]]:
    source = job.prompts[prompt]
    result = await engine.async_generate(
        input_ids=source.token_ids,
        sampling_params=job.sampling_of(prompt, sample),
        return_logprob=True,
    )
    meta = result["meta_info"]
    reason = meta["finish_reason"]
    if reason["type"] not in ("stop", "length"):
        raise RolloutError(
            f"prompt {source.id!r}, response {sample}: {reason.get('message', reason['type'])}"
        )
    logprobs = meta["output_token_logprobs"]
    response = Response(
        prompt_id=source.id,
        group_index=sample,
        prompt_token_ids=source.token_ids,
        token_ids=[token for _, token, *_ in logprobs],
        text=result["text"],
        logprobs=[logprob for logprob, *_ in logprobs],
        finish_reason=reason["type"],
        rounds=meta.get("s3r_rounds"),
        accept_length=meta.get("s3r_accept_length"),
        faithful=meta.get("s3r_faithful", True),
        metadata=source.metadata,
    )
    return response, meta.get("spec_accept_histogram", []) if response.faithful else []
