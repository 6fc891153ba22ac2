"""What goes over the wire at `/s3r/rollout`, checked strictly: unknown fields and wrong types are refused."""

import json
import math
import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from s3r_sglang.sampling import request_seed

# By which a sender names its update session: the update is refused once another sender has taken over. Without it,
# an update belongs to whoever has a session open.
SESSION_HEADER = "X-S3R-Session"

# A request is answered from memory, so one client must not be able to fill it.
MAX_BODY_BYTES = int(os.environ.get("S3R_MAX_BODY_BYTES", 64 << 20))
MAX_GROUP_SIZE = 1024

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
NonEmpty = Annotated[str, Field(min_length=1)]


def _check_id(value: Any) -> Any:
    """One fault for both types that an id may have; pydantic would report one for each."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError("must be a non-empty string or an integer")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_finite(value: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity; pydantic reads them, and would answer null."""
    rest: list[Any] = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"holds {item}, which JSON has no number for")
        if isinstance(item, dict | list):
            rest.extend(item.values() if isinstance(item, dict) else item)
    return value


Metadata = Annotated[dict[str, Any], AfterValidator(_check_finite)]
PromptId = Annotated[str | int, BeforeValidator(_check_id, json_schema_input_type=NonEmpty | int)]
Stop = Annotated[
    list[NonEmpty],
    BeforeValidator(_as_list, json_schema_input_type=NonEmpty | list[NonEmpty]),
    Field(max_length=64),
]


class Strict(BaseModel):
    """No coercion ("8" is not 8, true is not 1), no unknown fields, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Message(Strict):
    """One turn of a chat."""

    role: NonEmpty
    content: str


class Prompt(Strict):
    """A prompt in exactly one of three forms.

    Attributes:
        id: returned with the group, unique within the request.
        prompt: text, tokenised as it is.
        messages: a chat, put through the model's chat template with a generation prompt.
        token_ids: token ids, used as they are.
        max_new_tokens: length limit of this prompt's responses instead of the request's.
        seed: seed of this group; without it, it follows from the request's seed and the prompt's position.
        metadata: anything of the trainer's (a reference answer, say), returned with the group as it is.
    """

    id: PromptId
    prompt: NonEmpty | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    max_new_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _one_form(self) -> "Prompt":
        forms = [name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise ValueError("needs exactly one of prompt, messages and token_ids")
        return self


class Sampling(Strict):
    """Sampling parameters, with SGLang's meaning; the reported logprobs are those before top-k, top-p, min-p.

    Attributes:
        stop: a string, or a list of strings; a response ends with the first one that appears in its text.
    """

    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, lt=2**31)
    min_p: float = Field(default=0.0, ge=0, le=1)
    stop: Stop = []
    stop_token_ids: list[TokenId] = Field(default=[], max_length=1024)
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @model_validator(mode="after")
    def _means_what_it_says(self) -> "Sampling":
        if self.top_k == 0:
            raise ValueError("top_k must be -1 (off) or at least 1")
        if self.ignore_eos and self.stop_token_ids:
            raise ValueError("ignore_eos makes SGLang ignore stop_token_ids as well: drop one of the two")
        return self


class RolloutRequest(Strict):
    """Prompts in, one group of `group_size` responses for each out, all from one weight snapshot.

    Attributes:
        seed: makes the responses reproducible; a response does not depend on the size of its group.
        stream: NDJSON, one line per group in the order of completion, instead of one body in prompt order.
    """

    prompts: list[Prompt] = Field(min_length=1, max_length=65536)
    group_size: int = Field(ge=1, le=MAX_GROUP_SIZE)
    sampling: Sampling = Sampling()
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool = False

    @model_validator(mode="after")
    def _distinct_ids(self) -> "RolloutRequest":
        seen: set[str | int] = set()
        for prompt in self.prompts:
            if prompt.id in seen:
                raise ValueError(f"prompts: the id {prompt.id!r} occurs twice")
            seen.add(prompt.id)
        return self


class Response(BaseModel):
    """One response of a group.

    Attributes:
        index: place in the group, 0 … group_size - 1.
        token_ids: generated tokens, the stop token included.
        logprobs: one per token, of the dense policy at the rollout temperature; in mode direct, of the sparse
            policy that the token was sampled from, filters included, except for the first token, which is dense.
        truncated: whether a length limit ended it; its finish_reason is then "length".
        rounds: rounds that it took.
        accept_length: tokens per round, bonus token included; None if no round was needed, and in mode direct.
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    truncated: bool
    rounds: int
    accept_length: float | None


class Group(BaseModel):
    """A complete group.

    Attributes:
        prompt_index: place of the prompt in the request.
        prompt_tokens: length of `prompt_token_ids`.
        prompt_token_ids: what the responses were sampled after; a chat as the server's template rendered it.
        metadata: the prompt's.
        weight_version: the label of the weights that all tokens were sampled from.
        weight_updates: number of weight updates that the server had taken by then; differs if and only if
            the weights may, also for trainers that set no label.
        faithful: whether the responses have the dense policy's law; false in mode direct, where they are samples
            of the sparse policy.
        accept_length: tokens per round over the group (τ), bonus token included.
        acceptance_by_position: share of rounds in which the draft token at position 1 … k was accepted.
    """

    type: Literal["group"] = "group"
    prompt_id: str | int
    prompt_index: int
    prompt_tokens: int
    prompt_token_ids: list[int]
    metadata: dict[str, Any] | None
    responses: list[Response]
    weight_version: str
    weight_updates: int
    seed: int | None
    faithful: bool
    accept_length: float | None
    acceptance_by_position: list[float]


class GroupError(BaseModel):
    """A group that could not be completed; none of its responses is returned."""

    type: Literal["error"] = "error"
    prompt_id: str | int
    prompt_index: int
    message: str


class RolloutResponse(BaseModel):
    """The body of an answer that is not streamed: one entry per prompt, in the order of the prompts."""

    groups: list[Group | GroupError]


def repeated_key(body: bytes) -> str | None:
    """A key that some object of `body`, which is valid JSON, has twice; None if there is none."""
    repeated: list[str] = []

    def check(pairs: list[tuple[str, Any]]) -> None:
        keys = set()
        for key, _ in pairs:
            if key in keys:
                repeated.append(key)
            keys.add(key)

    json.loads(body, object_pairs_hook=check)
    return repeated[0] if repeated else None


def group_seed(seed: int, index: int) -> int:
    """Seed of the group of prompt `index` of a rollout with `seed`; the client and the server derive the same."""
    return request_seed(0, seed, index) & (2**63 - 1)
