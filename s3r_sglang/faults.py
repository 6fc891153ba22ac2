"""Faults in what users wrote, each as one sentence that says where it is and what to write instead."""

import difflib
from collections.abc import Collection, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

# Below this similarity a suggestion misleads more than it helps; difflib's own default.
SIMILAR = 0.6
# More names than this are no help in a sentence.
LISTED = 20


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """A sentence for a name that is not `known`: with the nearest one, or with all few if none is near."""
    if near := nearest(name, known):
        return f"unknown {kind} {name[:80]!r}; did you mean {near!r}?"
    listed = f"; known: {', '.join(sorted(known))}" if len(known) <= LISTED else ""
    return f"unknown {kind} {name[:80]!r}{listed}."


def nearest(name: str, known: Collection[str], similar: float = SIMILAR) -> str | None:
    """The name among `known` that is at least so similar, or None."""
    return next(iter(difflib.get_close_matches(name.lower(), known, n=1, cutoff=similar)), None)


def sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """The most telling fault of an input for `model`, as "place: what is wrong."; one line.

    A misspelt field is often missing under its right name as well, so unknown fields come first.
    """
    faults = error.errors(include_url=False, include_context=False)
    fault = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    *parents, last = fault["loc"] or (None,)
    if fault["type"] == "extra_forbidden":
        return _placed(parents, unknown("field", str(last), _fields_at(model, parents)))
    text = fault["msg"].removeprefix("Value error, ")
    text = text.replace("Input should be", "must be").replace("Field required", "is missing")
    return _placed(fault["loc"], text if text.endswith(".") else text + ".")


def _placed(place: Collection[int | str], text: str) -> str:
    prefix = ".".join(map(str, place))
    return f"{prefix}: {text}" if prefix else text


def _fields_at(model: type[BaseModel], place: Collection[int | str]) -> list[str]:
    """Names of the fields of the model that lies at `place` inside `model`."""
    for part in place:
        if isinstance(part, str):
            model = next(_models_in(model.model_fields[part].annotation), model)
    return list(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Pydantic models named by an annotation such as `list[Message] | None`, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
