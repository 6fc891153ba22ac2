"""Between OpenRLHF's view of vLLM (sampling parameters in, request outputs out) and the rollout service."""

from dataclasses import dataclass, field
from typing import Any

from s3r_sglang.server.protocol import Response, Sampling

# vLLM's parameters that the service does not have, and the value at which they do nothing. min_tokens is 1 in
# OpenRLHF, which bans an end token at the first position; S3R samples from the policy as it is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "min_tokens": (0, 1),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "seed": (None,),
    "bad_words": (None, []),
    "logit_bias": (None, {}),
    "logits_processors": (None,),
    "allowed_token_ids": (None,),
    "prompt_logprobs": (None,),
    "include_stop_str_in_output": (False,),
    "structured_outputs": (None,),
    "logprobs": (None, 0, 1),
}


def sampling_of(params: Any) -> Sampling:
    """The service's parameters for vLLM's SamplingParams `params` (the real ones or the stand-in's).

    Raises:
        ValueError: something is asked for that the service does not do, or is out of range.
    """
    for name, neutral in _NEUTRAL.items():
        value = getattr(params, name, neutral[0])
        if value not in neutral:
            raise ValueError(f"S3R rollouts do not support the sampling parameter {name}={value!r}")
    stop = params.stop or []
    return Sampling(
        max_new_tokens=params.max_tokens,
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        # vLLM switches top-k off by 0 as well.
        top_k=params.top_k or -1,
        min_p=float(params.min_p),
        stop=[stop] if isinstance(stop, str) else list(stop),
        stop_token_ids=list(params.stop_token_ids or []),
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
    )


@dataclass(frozen=True)
class Logprob:
    """vLLM's, reduced to what OpenRLHF reads."""

    logprob: float


@dataclass(frozen=True)
class Completion:
    """vLLM's CompletionOutput, reduced to what OpenRLHF's executors read.

    Attributes:
        token_ids: with the end token, if there is one.
        finish_reason: "stop" or "length".
        logprobs: one dictionary {token: Logprob} per token, or None if they were not asked for.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[dict[int, Logprob]] | None


@dataclass(frozen=True)
class RequestOutput:
    """vLLM's, with its one completion."""

    outputs: list[Completion] = field(default_factory=list)


def output_of(response: Response, logprobs: bool) -> RequestOutput:
    """`response` in vLLM's form."""
    pairs = zip(response.token_ids, response.logprobs, strict=True)
    return RequestOutput(
        [
            Completion(
                token_ids=list(response.token_ids),
                text=response.text,
                finish_reason=response.finish_reason,
                logprobs=[{token: Logprob(value)} for token, value in pairs] if logprobs else None,
            )
        ]
    )
