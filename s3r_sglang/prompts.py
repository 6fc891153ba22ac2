"""Prompt files: JSON lines, checked as a whole before an engine starts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMS = ("prompt", "messages", "token_ids")


class PromptError(ValueError):
    """A prompt file is unusable; the message names file and line, and says what is wrong."""


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file. Exactly one of `prompt`, `messages`, `token_ids` is set."""

    where: str
    id: str | int
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    token_ids: list[int] | None = None


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the engine gets it."""

    id: str | int
    token_ids: list[int]


def load(path: Path) -> list[Prompt]:
    """Read a prompt file: a row is {"id": …} with one of "prompt" (text), "messages" (chat) or "token_ids".

    Other keys are ignored, blank lines are skipped.

    Raises:
        PromptError: unreadable file, no rows, a malformed row, or an id that occurs twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path}: cannot be read ({error})") from None
    prompts = [_parse(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f"{path}: holds no prompts")
    seen: dict[str | int, str] = {}
    for prompt in prompts:
        if prompt.id in seen:
            raise PromptError(f"{prompt.where}: id {prompt.id!r} was used before, at {seen[prompt.id]}")
        seen[prompt.id] = prompt.where
    return prompts


def _parse(where: str, line: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise PromptError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
    if not isinstance(row.get("id"), str | int) or isinstance(row["id"], bool):
        raise PromptError(f'{where}: needs an "id" that is a string or an integer')
    given = [form for form in FORMS if form in row]
    if len(given) != 1:
        found = " and ".join(f'"{form}"' for form in given) or "none"
        raise PromptError(f'{where}: needs exactly one of "prompt", "messages", "token_ids"; has {found}')
    form = given[0]
    fault = {"prompt": _prompt_fault, "messages": _messages_fault, "token_ids": _token_ids_fault}[form]
    if problem := fault(row[form]):
        raise PromptError(f'{where}: "{form}" {problem}')
    return Prompt(where, row["id"], **{form: row[form]})


def _prompt_fault(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "must be a non-empty string"


def _messages_fault(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return "must be a non-empty list"
    for message in value:
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
            return 'must hold objects with the strings "role" and "content"'
    return None


def _token_ids_fault(value: Any) -> str | None:
    whole = isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
    return None if whole and value else "must be a non-empty list of token ids"


def encode(
    prompts: list[Prompt], tokenizer: Any, context_length: int, max_new_tokens: int
) -> list[EncodedPrompt]:
    """Turn prompts into token ids, and check that each fits the model with its response.

    Args:
        prompts: rows of `load`.
        tokenizer: of transformers; `messages` go through its chat template.
        context_length: positions of the model.
        max_new_tokens: length limit of a response.

    Raises:
        PromptError: a token id outside the vocabulary, a prompt too long, or no chat template.
    """
    encoded = []
    for prompt in prompts:
        token_ids = _token_ids(prompt, tokenizer)
        if max(token_ids) >= len(tokenizer):
            raise PromptError(
                f"{prompt.where}: token id {max(token_ids)} is outside the vocabulary of {len(tokenizer)}"
            )
        if len(token_ids) + max_new_tokens > context_length:
            raise PromptError(
                f"{prompt.where}: {len(token_ids)} prompt tokens and {max_new_tokens} new ones exceed the "
                f"{context_length} positions of the model; shorten the prompt or lower --max-new-tokens"
            )
        encoded.append(EncodedPrompt(prompt.id, token_ids))
    return encoded


def _token_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    if prompt.token_ids is not None:
        return prompt.token_ids
    if prompt.prompt is not None:
        return tokenizer(prompt.prompt).input_ids
    if tokenizer.chat_template is None:
        raise PromptError(
            f'{prompt.where}: the model has no chat template; give "prompt" instead of "messages"'
        )
    return tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
