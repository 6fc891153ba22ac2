"""The load of a measurement, and throughput at fixed concurrency from the times at which tokens arrive."""

import asyncio
import bisect
import itertools
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Every request's output reaches the client at this rate. Autoregressive requests all stream in step, so 16
# tokens at a time cost the scheduler least. A speculative request would rarely meet SGLang's rule (length % 16
# == 1): it reports each round, which is every 5 to 6 tokens.
AR_STREAM_INTERVAL = 16
S3R_STREAM_INTERVAL = 1


class LoadError(ValueError):
    """The requested load is not possible; the message says what to change."""


@dataclass(frozen=True, order=True)
class Setting:
    """B requests in progress, each with S tokens of prompt."""

    batch_size: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.context}"


def parse_settings(text: str) -> list[Setting]:
    """Settings from "64x8192,32x16K"; raises LoadError."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(K?)", word.strip(), re.IGNORECASE)
        if match is None:
            raise LoadError(f"{word!r} is not BATCHxCONTEXT, such as 64x8192 or 64x8K")
        setting = Setting(int(match[1]), int(match[2]) * (1024 if match[3] else 1))
        if setting in found:
            raise LoadError(f"{setting} occurs twice")
        found.append(setting)
    return found


def random_prompts(vocab_size: int, batch_size: int, context: int, seed: int = 0) -> list[list[int]]:
    """[B][S] uniform token ids."""
    return [random.Random(seed + i).choices(range(vocab_size), k=context) for i in range(batch_size)]


def text_prompts(folder: Path, source: Path, batch_size: int, context: int) -> list[list[int]]:
    """[B][S] stretches of a text that start at evenly spaced places.

    Raises:
        LoadError: the text is too short for B different ones.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(source.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    spare = len(tokens) - context
    if spare < batch_size - 1:
        raise LoadError(
            f"{source} has {len(tokens)} tokens, too few for {batch_size} different prompts of {context}"
        )
    stride = spare // max(1, batch_size - 1)
    return [tokens[i * stride : i * stride + context] for i in range(batch_size)]


@dataclass
class Trace:
    """What one request emitted: after times[i] seconds, counts[i] tokens in all."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def count_at(self, moment: float) -> float:
        """Tokens by `moment`, interpolated between two reports.

        The reports of a request are its rounds, at a random phase to the window; interpolating makes the
        error at both ends of the window the same on average.
        """
        i = bisect.bisect_right(self.times, moment)
        if i == 0:
            return 0.0
        if i == len(self.times):
            return float(self.counts[-1])
        share = (moment - self.times[i - 1]) / (self.times[i] - self.times[i - 1])
        return self.counts[i - 1] + share * (self.counts[i] - self.counts[i - 1])


def decode(
    engine: Any, prompts: Sequence[list[int]], sampling: dict[str, Any], new_tokens: int, stream_interval: int
) -> list[Trace]:
    """Generate exactly `new_tokens` for every prompt at once, EOS off."""
    params = {
        **sampling,
        "max_new_tokens": new_tokens,
        "ignore_eos": True,
        "stream_interval": stream_interval,
    }
    return engine.loop.run_until_complete(_decode(engine, prompts, params))


async def _decode(engine: Any, prompts: Sequence[list[int]], params: dict[str, Any]) -> list[Trace]:
    async def one(prompt: list[int]) -> Trace:
        trace = Trace()
        stream = await engine.async_generate(input_ids=prompt, sampling_params=params, stream=True)
        async for chunk in stream:
            trace.times.append(time.perf_counter())
            trace.counts.append(chunk["meta_info"]["completion_tokens"])
            trace.meta = chunk["meta_info"]
        if trace.meta["finish_reason"]["type"] != "length":
            raise LoadError(f"a request ended early: {trace.meta['finish_reason']}")
        return trace

    return await asyncio.gather(*map(one, prompts))


@dataclass(frozen=True)
class Window:
    """Steady decoding: all requests are past their first tokens, and none has finished."""

    tokens: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.tokens / self.seconds


def steady_window(traces: Sequence[Trace], settle_tokens: int) -> Window:
    """Tokens between the moment when the last request has emitted `settle_tokens` and the first finish.

    Counting at two moments, rather than timing whole responses, keeps the batch full: speculative requests
    finish rounds apart (τ varies), and the drained batch would be counted against them.

    Raises:
        LoadError: there is no such window.
    """
    begin = max(trace.times[bisect.bisect_left(trace.counts, settle_tokens)] for trace in traces)
    end = min(trace.times[-1] for trace in traces)
    if end <= begin:
        raise LoadError(
            "a request had finished before the last one was running: raise --new-tokens, or lower the batch"
        )
    return Window(sum(trace.count_at(end) - trace.count_at(begin) for trace in traces), end - begin)


def accept_histogram(traces: Sequence[Trace]) -> list[int]:
    """Rounds of all requests by number of accepted drafts; empty without speculation."""
    rows = [trace.meta.get("spec_accept_histogram", []) for trace in traces]
    return [sum(column) for column in itertools.zip_longest(*rows, fillvalue=0)]
