"""The plugin's fields of `ServerArgs`: flags, keyword arguments of `sgl.Engine`, and transport in one.

As dataclass fields they are what SGLang itself works with: its parser makes the flags, `--config` files may
set them, and copies, `asdict`, pickles to the scheduler processes and `/server_info` carry them. Only
`__init__`, which was generated before the fields existed, has to be hooked.
"""

import argparse
import dataclasses
import os
from collections.abc import Collection, Sequence
from typing import Annotated, Any, NoReturn, Optional

from s3r_sglang.config import (
    CONFIG_ENV,
    CONFIG_FIELD,
    FIELD_PREFIX,
    ConfigError,
    S3RConfig,
    flag_fields,
    is_self_sparse,
    resolve,
    server_args_fields,
)
from s3r_sglang.faults import unknown


def add_fields() -> None:
    """Add the `s3r_*` fields to `ServerArgs`, all optional and None: "not set by the user"."""
    from sglang.srt.arg_groups.arg_utils import namespace_of, resolvable_fields
    from sglang.srt.server_args import ServerArgs

    ours = dataclasses.make_dataclass("S3RFields", [(*item, None) for item in _annotations().items()])
    for field in dataclasses.fields(ours):
        ServerArgs.__annotations__[field.name] = field.type
        ServerArgs.__dataclass_fields__[field.name] = field
        setattr(ServerArgs, field.name, None)
    namespace_of.cache_clear()
    resolvable_fields.cache_clear()


def has_fields() -> bool:
    """Whether `add_fields` has taken effect in this process."""
    from sglang.srt.server_args import ServerArgs

    return set(server_args_fields()) <= {field.name for field in dataclasses.fields(ServerArgs)}


def _annotations() -> dict[str, Any]:
    from sglang.srt.arg_groups.arg_utils import NS, Arg

    help_of_file = f"S3R: YAML file, or the name of a shipped one. Environment: {CONFIG_ENV}."
    annotations = {CONFIG_FIELD: Annotated[Optional[str], Arg(help=help_of_file), NS("spec")]}  # noqa: UP045
    for name, field in flag_fields().items():
        info = S3RConfig.model_fields[name]
        text = f"S3R: {info.description} Default: {info.default}."
        # SGLang's flag generator understands typing.Optional only, not the `T | None` of the type system.
        annotations[field] = Annotated[Optional[info.annotation], Arg(help=text), NS("spec")]  # noqa: UP045
    return annotations


def init_with_s3r_fields(original_init, self, *args, **kwargs) -> None:
    """Around `ServerArgs.__init__`: take our keyword arguments, and resolve the configuration into them.

    Resolved before SGLang resolves the rest, because that reads `speculative_eagle_topk`: left unset, it is
    taken to be above 1 in places, and FlashInfer would be preferred to FA3 on Hopper.
    """
    ours = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith(FIELD_PREFIX)}
    for name in ours:
        if name not in server_args_fields():
            raise ConfigError(_unknown("argument", name, server_args_fields()))
    if is_self_sparse(kwargs.get("speculative_algorithm")):
        _resolve_into(ours, kwargs)
    else:
        for name, value in ours.items():
            if value is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} needs --speculative-algorithm self-sparse; add it or drop {flag}.")
    for name in server_args_fields():
        setattr(self, name, ours.get(name))
    original_init(self, *args, **kwargs)


def _resolve_into(ours: dict[str, Any], kwargs: dict[str, Any]) -> None:
    config = resolve(kwargs | ours)
    for name, field in flag_fields().items():
        ours[field] = getattr(config, name)
    block = {
        "speculative_num_steps": config.draft_length,
        "speculative_num_draft_tokens": config.draft_length + 1,
        "speculative_eagle_topk": 1,
    }
    for name, value in block.items():
        if kwargs.get(name) not in (None, value):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} must be {value} for a draft of {config.draft_length} tokens, not {kwargs[name]}; "
                f"drop it, --speculative-num-steps is enough."
            )
    kwargs.update(block)


def _unknown(kind: str, name: str, known: Collection[str]) -> str:
    if name.lstrip("-").replace("-", "_") == f"{FIELD_PREFIX}draft_length":
        return f"unknown {kind} {name!r}; the draft length is SGLang's --speculative-num-steps."
    return unknown(kind, name, known)


class _OneSentenceParser(argparse.ArgumentParser):
    """Raises faults, before which argparse would print the usage of SGLang's 500 flags."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.")


def one_sentence_on_the_command_line(original, argv):
    """Around `prepare_server_args`: a wrong flag or a configuration fault ends the command with one sentence.

    Command lines that have nothing of S3R are left to SGLang.
    """
    try:
        if any(word.startswith("--s3r-") or is_self_sparse(word.rpartition("=")[2]) for word in argv):
            _check_flags(argv)
        return original(argv)
    except ConfigError as fault:
        raise SystemExit(f"error: {fault}") from None


def _check_flags(argv: Sequence[str]) -> None:
    from sglang.srt.server_args import ServerArgs

    if "--config" in argv:
        # Its file may hold what is required here; SGLang merges the two.
        return
    parser = _OneSentenceParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    known, rest = parser.parse_known_args(argv)
    for word in rest:
        if not word.startswith("-"):
            raise ConfigError(f"'{word}' belongs to no flag.")
        flags = ["--" + field.name.replace("_", "-") for field in dataclasses.fields(ServerArgs)]
        raise ConfigError(_unknown("flag", word.partition("=")[0], flags))
    # Anything else may be a name on a hub, or an address.
    if known.model_path.startswith(("/", ".", "~")) and not os.path.exists(known.model_path):
        raise ConfigError(f"the model folder {known.model_path} does not exist.")
