"""One group: from a prompt of a request to SGLang and back, complete or as one error."""

import itertools
from dataclasses import dataclass
from typing import Any

from s3r_sglang import prompts
from s3r_sglang.metrics import acceptance_by_position
from s3r_sglang.server.protocol import Group, GroupError, Prompt, Response, RolloutRequest, group_seed


class BadRequestError(ValueError):
    """The request cannot be served; the message is one sentence for the client."""


@dataclass(frozen=True)
class Limits:
    """What the model and its KV pool allow.

    Attributes:
        context: positions of the model.
        input: longest prompt that the KV pool takes.
        vocab: number of token ids that the model embeds.
    """

    context: int
    input: int
    vocab: int


@dataclass(frozen=True)
class Plan:
    """A group that is ready to be sampled."""

    index: int
    prompt: Prompt
    token_ids: list[int]
    size: int
    sampling: dict[str, Any]


def plan(request: RolloutRequest, tokenizer: Any, limits: Limits) -> list[Plan]:
    """Tokenise and check all prompts, so that a request is refused as a whole or not at all.

    Raises:
        BadRequestError: a token id outside the vocabulary, a prompt too long, or a chat that the template refuses.
    """
    return [_plan(request, index, prompt, tokenizer, limits) for index, prompt in enumerate(request.prompts)]


def _plan(request: RolloutRequest, index: int, prompt: Prompt, tokenizer: Any, limits: Limits) -> Plan:
    where = f"prompts.{index}"
    try:
        token_ids = prompts.token_ids(prompt, tokenizer)
    except prompts.PromptError as error:
        raise BadRequestError(f"{where}: {error}") from None
    if max(token_ids) >= limits.vocab:
        raise BadRequestError(
            f"{where}: token id {max(token_ids)} is outside the model's vocabulary of {limits.vocab}."
        )
    new = prompt.max_new_tokens or request.sampling.max_new_tokens
    if len(token_ids) + new > limits.context or len(token_ids) >= limits.input:
        raise BadRequestError(
            f"{where}: {len(token_ids)} prompt tokens and {new} new ones do not fit: the model has "
            f"{limits.context} positions, and the KV pool takes prompts of fewer than {limits.input} tokens."
        )
    sampling = request.sampling.model_dump() | {"max_new_tokens": new, "n": request.group_size}
    sampling["sampling_seed"] = _seed(request, index, prompt)
    return Plan(index, prompt, token_ids, request.group_size, sampling)


def _seed(request: RolloutRequest, index: int, prompt: Prompt) -> int | None:
    """Seed of the group: its first sample uses it as it is, the others derive theirs (`seed_of_sample`)."""
    if prompt.seed is not None or request.seed is None:
        return prompt.seed
    return group_seed(request.seed, index)


async def sample(manager: Any, group: Plan, rid: str, updates: int, draft_length: int) -> Group | GroupError:
    """Sample all responses of `group` with SGLang's TokenizerManager.

    The parallel samples of one SGLang request: it prefills the prompt once and the samples share its KV, and
    each sample has a seed of its own (patches/tokenizer_manager.py).

    Args:
        rid: SGLang's request id, by which the group can be aborted.
        updates: weight updates so far; the caller keeps the weights as they are meanwhile.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    version = manager.config_value("weight_version")
    request = GenerateReqInput(
        rid=rid, input_ids=group.token_ids, sampling_params=dict(group.sampling), return_logprob=True
    )
    try:
        outputs = await manager.generate_request(request).__anext__()
    except Exception as error:  # SGLang reports refusals and aborts by exceptions of many types
        return GroupError(
            prompt_id=group.prompt.id,
            prompt_index=group.index,
            message=getattr(error, "detail", None) or str(error) or type(error).__name__,
        )
    outputs = outputs if isinstance(outputs, list) else [outputs]
    reasons = [output["meta_info"]["finish_reason"] for output in outputs]
    for reason in reasons:
        if reason["type"] not in ("stop", "length"):
            message = reason.get("message") or reason["type"]
            return GroupError(prompt_id=group.prompt.id, prompt_index=group.index, message=message)
    histogram = _sum(_verified(output["meta_info"]) for output in outputs)
    return Group(
        prompt_id=group.prompt.id,
        prompt_index=group.index,
        prompt_tokens=len(group.token_ids),
        prompt_token_ids=group.token_ids,
        metadata=group.prompt.metadata,
        responses=[_response(index, output) for index, output in enumerate(outputs)],
        weight_version=version,
        weight_updates=updates,
        seed=group.sampling["sampling_seed"],
        faithful=all(output["meta_info"].get("s3r_faithful", True) for output in outputs),
        accept_length=accept_length(histogram),
        acceptance_by_position=acceptance_by_position(histogram, draft_length),
    )


def accept_length(histogram: list[int]) -> float | None:
    """Tokens per round, bonus token included; None without rounds. histogram[a]: rounds with a accepted drafts."""
    rounds = sum(histogram)
    return 1 + sum(a * count for a, count in enumerate(histogram)) / rounds if rounds else None


def _verified(meta: dict[str, Any]) -> list[int]:
    """Rounds of a response by accepted drafts; none if drafts were emitted without verification."""
    return meta.get("spec_accept_histogram", []) if meta.get("s3r_faithful", True) else []


def _sum(histograms: Any) -> list[int]:
    return [sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)]


def _response(index: int, output: dict[str, Any]) -> Response:
    meta = output["meta_info"]
    return Response(
        index=index,
        token_ids=[token for _, token, *_ in meta["output_token_logprobs"]],
        text=output.get("text") or "",
        logprobs=[logprob for logprob, *_ in meta["output_token_logprobs"]],
        finish_reason=meta["finish_reason"]["type"],
        truncated=meta["finish_reason"]["type"] == "length",
        rounds=meta.get("s3r_rounds", 0),
        accept_length=accept_length(_verified(meta)),
    )
