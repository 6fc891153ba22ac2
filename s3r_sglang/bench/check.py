"""Are the responses that were timed those of the dense policy? A check in the same engines."""

import itertools
from dataclasses import dataclass
from typing import Any

from s3r_sglang.bench.records import Correctness


@dataclass(frozen=True)
class Response:
    """A response at temperature 0 or 1: its prompt, its tokens, and the logprobs that the engine reported."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, prompt: list[int], output: dict[str, Any]) -> "Response":
        """From the engine's output for `prompt`, generated with `return_logprob`."""
        logprobs = output["meta_info"]["output_token_logprobs"]
        return cls(prompt, [token for _, token, *_ in logprobs], [value for value, *_ in logprobs])


def greedy(engine: Any, prompts: list[list[int]], new_tokens: int) -> list[Response]:
    """Greedy responses of an engine, all prompts in one batch, EOS off."""
    outputs = engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True},
        return_logprob=True,
    )
    return [Response.of(*pair) for pair in zip(prompts, outputs, strict=True)]


def compare(dense_engine: Any, s3r: list[Response], dense: list[Response], informative: bool) -> Correctness:
    """Judge S3R's responses by the engine that decodes densely.

    Args:
        dense_engine: the autoregressive engine, which prefills prompt and response to score them.
        s3r, dense: responses of the two engines to the same prompts.
        informative: whether the model's weights are real.
    """
    equal = [_equal_until_difference(*pair) for pair in zip(s3r, dense, strict=True)]
    return Correctness(
        responses=len(s3r),
        tokens=sum(len(response.tokens) for response in s3r),
        equal_tokens=sum(equal) / len(equal),
        s3r_logprob_error=logprob_error(dense_engine, s3r),
        ar_logprob_error=logprob_error(dense_engine, dense),
        informative=informative,
    )


def _equal_until_difference(one: Response, other: Response) -> float:
    pairs = zip(one.tokens, other.tokens, strict=True)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(one.tokens)


def logprob_error(dense_engine: Any, responses: list[Response]) -> float:
    """Mean |reported logprob - logprob by a dense prefill of the same tokens| over all tokens."""
    scored = dense_engine.generate(
        input_ids=[response.prompt + response.tokens for response in responses],
        sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=[len(response.prompt) - 1 for response in responses],
    )
    errors: list[float] = []
    for response, output in zip(responses, scored, strict=True):
        # The ids in these entries are of no use: SGLang 0.5.17 reports the last id of the vocabulary as 0.
        entries = output["meta_info"]["input_token_logprobs"][-len(response.tokens) :]
        pairs = zip(response.logprobs, entries, strict=True)
        errors += [abs(reported - value) for reported, (value, *_) in pairs]
    return sum(errors) / len(errors)
