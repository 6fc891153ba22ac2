"""Start SGLang with defaults that suit the device; whatever the user says wins."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from s3r_sglang import cpu
from s3r_sglang.config import CONFIG_ENV, S3RConfig, flag_of, resolve, server_args_fields
from s3r_sglang.processes import NOT_READY, ended_by_interrupts

# SGLang sizes the KV pool to most of the machine's memory, which a CPU run on a workstation should not take.
# 32K tokens of float32 take 1.4 GiB for SmolLM2-135M and 1.8 GiB for Qwen2.5-Coder-1.5B.
CPU_POOL_TOKENS = 32768


def arguments(argv: Sequence[str], on_gpu: bool, speculative: bool = True) -> list[str]:
    """`argv` for SGLang's own parser, plus the defaults of the device that it does not mention.

    On a GPU SGLang chooses the attention backend itself (fa3 on Hopper). With `speculative` false, what the
    user set for speculation is dropped, which gives the autoregressive engine that is otherwise the same.
    """
    if argv and not argv[0].startswith("-"):
        # As in `sglang serve MODEL`.
        argv = ["--model-path", *argv]
    argv = list(argv) if speculative else _without_speculation(argv)
    defaults: dict[str, object] = {"speculative_algorithm": "self-sparse"} if speculative else {}
    if not on_gpu:
        defaults |= cpu.SERVER_ARGS | {"max_total_tokens": CPU_POOL_TOKENS}
        if not cpu.has_bf16():
            # Emulated bfloat16 is slow: on one AVX2 core, SmolLM2's LM head takes 1.38 s for 70 rows, not 0.42.
            defaults["dtype"] = "float32"
    return [*argv, *_missing(argv, defaults)]


def flags() -> Iterator[tuple[str, str]]:
    """S3R's flags with their descriptions, for help."""
    yield "--s3r-config", f"YAML file, or the name of a shipped one; also {CONFIG_ENV}."
    for name, field in S3RConfig.model_fields.items():
        default = "" if field.default is None else f" Default: {str(field.default).lower()}."
        yield flag_of(name), f"{field.description}{default}"


def configuration(argv: Sequence[str]) -> S3RConfig:
    """What the flags of S3R among arguments for SGLang mean, before anything starts; raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for field in (*server_args_fields(), "speculative_num_steps"):
        parser.add_argument("--" + field.replace("_", "-"), nargs="?")
    return resolve(vars(parser.parse_known_args(argv)[0]))


def _without_speculation(argv: Sequence[str]) -> list[str]:
    kept: list[str] = []
    dropping = False
    for word in argv:
        if word.startswith("--"):
            dropping = word.startswith(("--s3r-", "--speculative-"))
        if not dropping:
            kept.append(word)
    return kept


def _missing(argv: Sequence[str], defaults: dict[str, object]) -> list[str]:
    given = {word.split("=", 1)[0] for word in argv}
    words = []
    for name, value in defaults.items():
        flag = "--" + name.replace("_", "-")
        if flag not in given:
            words += [flag] if value is True else [flag, str(value)]
    return words


def serve(argv: Sequence[str]) -> NoReturn:
    """Become SGLang's launcher (s3r_sglang/commands/serve.py) with `argv` and the defaults."""
    environ = dict(os.environ)
    with ended_by_interrupts(NOT_READY):
        on_gpu = cpu.has_gpu()
        if not on_gpu:
            cpu.prepare(environ)
    command = [sys.executable, "-m", "s3r_sglang.commands.serve", *arguments(argv, on_gpu)]
    # Replaces this process, so that signals and the exit status are the server's own.
    sys.stdout.flush()
    os.execve(command[0], command, environ)


def open_engine(argv: Sequence[str]):
    """Start an `sgl.Engine` in this process from command-line arguments for SGLang.

    The first call must come before anything imports `sglang`, see `cpu.prepare`.
    """
    if not cpu.has_gpu():
        cpu.prepare()
    import sglang
    from sglang.srt import server_args
    from sglang.srt.plugins import load_plugins

    # Hooks on argument parsing are part of the plugin; sglang.Engine would load it too late for them.
    load_plugins()
    return sglang.Engine(server_args=server_args.prepare_server_args(list(argv)))
