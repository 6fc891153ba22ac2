"""Requests that the round could not answer exactly are refused; SGLang turns the ValueError into HTTP 400."""

import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from s3r_sglang.faults import unknown
from s3r_sglang.sampling import request_seed

# A round verifies k + 1 positions in one forward. What changes the target distribution from one position to
# the next by more than the tokens' own context would need its state replayed inside the block.
_NEUTRAL_PARAMS = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
}

# Request options that change how tokens are produced, or return internals of forwards that also hold
# rejected drafts.
_UNSET_OPTIONS = (
    "custom_logit_processor",
    "return_hidden_states",
    "return_sampling_mask",
    "return_routed_experts",
    "return_indexer_topk",
    "lora_id",
    "mm_inputs",
    "input_embeds",
    "positional_embed_overrides",
    "multi_item_delimiter_indices",
    "session_params",
)


# What the OpenAI endpoints call it.
_ALIASES = {
    "json_schema": "response_format",
    "structural_tag": "response_format or tools",
    "min_new_tokens": "min_tokens",
}


def refuse_unknown(sampling_params: Mapping[str, Any]) -> None:
    """Raise ValueError if SGLang has no sampling parameter of one of these names; it would fail with HTTP 500."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    for name in sampling_params:
        if name not in SamplingParams.__struct_fields__:
            raise ValueError(f"sampling_params: {unknown('field', name, SamplingParams.__struct_fields__)}")


def refuse_inexact(request: Any) -> None:
    """Raise ValueError if `request` (SGLang's TokenizedGenerateReqInput) asks for an unsupported feature."""
    for name, neutral in _NEUTRAL_PARAMS.items():
        value = getattr(request.sampling_params, name)
        if value != neutral:
            # The OpenAI endpoints take penalties from the model's generation_config.json if a request has none.
            default = name.endswith("_penalty")
            hint = (
                ", or start the server with --sampling-defaults openai if the model sets it"
                if default
                else ""
            )
            alias = f" ({_ALIASES[name]} in the OpenAI API)" if name in _ALIASES else ""
            raise ValueError(
                f"Self-sparse speculative decoding does not support {name}={value!r}{alias}: leave it out{hint}."
            )
    if "thinking_budget" in (request.sampling_params.custom_params or {}):
        raise ValueError(
            "Self-sparse speculative decoding does not support max_thinking_tokens: leave it out."
        )
    for name in _UNSET_OPTIONS:
        if getattr(request, name):
            raise ValueError(f"Self-sparse speculative decoding does not support {name}: leave it out.")


def refuse_fatal(request: Any, vocab_size: int) -> None:
    """Raise ValueError if SGLang would take `request`, a TokenizedGenerateReqInput, and its scheduler die of it.

    On a GPU a token id outside the vocabulary fails an assertion on the device, and all requests with it. A bias
    that is not a number leaves no distribution to sample from.
    """
    params = request.sampling_params
    # Not one of numpy either, which overflows when it is mixed.
    _require("sampling_seed", params.sampling_seed, int)
    for name in ("top_k", "max_new_tokens"):
        _require(name, getattr(params, name), Integral)
    for name in ("top_logprobs_num", "logprob_start_len"):
        _require(name, getattr(request, name), Integral)
    for token, bias in (params.logit_bias or {}).items():
        if not bias < math.inf:
            raise ValueError(f"logit_bias of token {token} must be a number below infinity, not {bias}.")
    for token in (min(request.input_ids, default=0), max(request.input_ids, default=0)):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"input_ids: token id {token} is outside the model's vocabulary of {vocab_size}."
            )
    if request.return_logprob and request.logprob_start_len < -1:
        raise ValueError(
            f"logprob_start_len must be a position of the prompt or -1, not {request.logprob_start_len}."
        )
    if request.return_logprob and request.top_logprobs_num > vocab_size:
        raise ValueError(
            f"top_logprobs_num {request.top_logprobs_num} exceeds the model's vocabulary of {vocab_size}."
        )


def _require(name: str, value: Any, integer: type) -> None:
    if value is not None and not isinstance(value, integer):
        raise ValueError(f"{name} must be an integer, not {value!r}.")


def seed_of_sample(seed: int, sample: int) -> int:
    """Seed of sample `sample` (0, 1, …) of a request with n > 1: distinct, and the first keeps the user's.

    So the first of n samples equals the response to the same request with n = 1.
    """
    return seed if sample == 0 else request_seed(0, seed, sample) & (2**63 - 1)
