"""Prompts: JSON-lines files, checked as a whole before an engine starts, and their token ids."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from s3r_sglang.faults import sentence
from s3r_sglang.server.protocol import Prompt


class PromptError(ValueError):
    """A prompt is unusable; for a row of a file, the message begins with file and line."""


class FilePrompt(Prompt):
    """A row of a prompt file: a prompt, or one with the two keys that trainers read, for its metadata."""

    answer: Any = None
    datasource: Any = None

    @model_validator(mode="after")
    def _one_value(self) -> "FilePrompt":
        metadata = self.metadata or {}
        for name, value in self._keys().items():
            if name in metadata and metadata[name] != value:
                raise ValueError(f"{name} and metadata.{name} differ: drop one of the two")
        return self

    def as_prompt(self) -> Prompt:
        """The prompt with the two keys in its metadata."""
        return self.model_copy(update={"metadata": (self.metadata or {}) | self._keys() or None})

    def _keys(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in ("answer", "datasource") if name in self.model_fields_set
        }


@dataclass(frozen=True)
class Row:
    """A prompt and its place, `file:line`."""

    where: str
    prompt: Prompt


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the engine gets it, and what `Prompt` says of its responses."""

    id: str | int
    token_ids: list[int]
    max_new_tokens: int | None = None
    seed: int | None = None
    metadata: dict[str, Any] | None = None


def load(path: Path) -> list[Row]:
    """Read a prompt file: each row is what `/s3r/rollout` takes as a prompt; blank lines are skipped.

    A row of `s3r data prepare` also has the keys `answer` and `datasource`, which go into the metadata.

    Raises:
        PromptError: no file or an unreadable one, no rows, a malformed row, an unknown key, a key that the
            metadata contradicts, or an id that occurs twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise PromptError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PromptError(f"{path}: cannot be read ({reason})") from None
    rows = [_parse(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise PromptError(f"{path}: holds no prompts")
    seen: dict[str | int, str] = {}
    for row in rows:
        if row.prompt.id in seen:
            raise PromptError(f"{row.where}: id {row.prompt.id!r} was used before, at {seen[row.prompt.id]}")
        seen[row.prompt.id] = row.where
    return rows


def _parse(where: str, line: str) -> Row:
    try:
        return Row(where, FilePrompt.model_validate_json(line).as_prompt())
    except ValidationError as error:
        raise PromptError(f"{where}: {sentence(error, FilePrompt)}") from None


def encode(rows: list[Row], tokenizer: Any, context_length: int, max_new_tokens: int) -> list[EncodedPrompt]:
    """Turn prompts into token ids, and check that each fits the model with its response.

    Args:
        rows: of `load`.
        tokenizer: of transformers; `messages` go through its chat template.
        context_length: positions of the model.
        max_new_tokens: length limit of a response whose prompt sets none.

    Raises:
        PromptError: no tokens, a token id outside the vocabulary, a prompt too long, or a chat that the template
            refuses.
    """
    encoded = []
    for row in rows:
        prompt = row.prompt
        try:
            ids = token_ids(prompt, tokenizer)
        except PromptError as error:
            raise PromptError(f"{row.where}: {error}") from None
        if max(ids) >= len(tokenizer):
            raise PromptError(
                f"{row.where}: token id {max(ids)} is outside the vocabulary of {len(tokenizer)}"
            )
        new = prompt.max_new_tokens or max_new_tokens
        if len(ids) + new > context_length:
            raise PromptError(
                f"{row.where}: {len(ids)} prompt tokens and {new} new ones exceed the {context_length} positions "
                "of the model; shorten the prompt or lower max_new_tokens"
            )
        encoded.append(EncodedPrompt(prompt.id, ids, prompt.max_new_tokens, prompt.seed, prompt.metadata))
    return encoded


def token_ids(prompt: Prompt, tokenizer: Any | None) -> list[int]:
    """Token ids of a prompt in any of its forms, at least one.

    Args:
        tokenizer: of transformers, or None where there is none; then only `token_ids` can be used.

    Raises:
        PromptError: no tokens, no tokenizer or chat template, or a chat that the template refuses.
    """
    ids = prompt.token_ids if prompt.token_ids is not None else _tokenize(prompt, tokenizer)
    if not ids:
        raise PromptError("the prompt has no tokens.")
    return ids


def _tokenize(prompt: Prompt, tokenizer: Any | None) -> list[int]:
    if tokenizer is None:
        raise PromptError("the server runs without a tokenizer; give token_ids.")
    if prompt.prompt is not None:
        return tokenizer(prompt.prompt).input_ids
    if tokenizer.chat_template is None:
        raise PromptError("the model has no chat template; give prompt instead of messages.")
    messages = [message.model_dump() for message in prompt.messages or ()]
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
    except Exception as error:  # templates are programs of the model's author and raise what they like
        raise PromptError(f"the chat template refuses the messages ({error}).") from None
