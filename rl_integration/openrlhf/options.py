"""The `--s3r.*` flags of `s3r-openrlhf`; all others are OpenRLHF's own. Imports neither Ray nor OpenRLHF."""

import argparse
import difflib
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

MODES = ("exact", "direct", "autoregressive")
# Prints OpenRLHF's own help.
HELP_ALL = "--help-all"


@dataclass(frozen=True)
class Options:
    """What the `--s3r.*` flags say; `parser` has the meaning of each."""

    engine_python: str | None
    mode: str
    config: str | None
    server_args: list[str]
    port: int | None
    bucket_mib: int
    restarts: int
    start_timeout: float
    log_dir: str | None
    weight_sync: bool
    correction: str | None


def parser() -> argparse.ArgumentParser:
    """Parser of the `--s3r.*` flags alone, for `parse_known_args`."""
    result = argparse.ArgumentParser(
        prog="s3r-openrlhf",
        allow_abbrev=False,
        add_help=False,
        usage="s3r-openrlhf setup [--folder FOLDER]\n"
        "       s3r-openrlhf [--s3r.FLAG …] [any flag of openrlhf.cli.train_ppo_ray …]",
        description="Train with OpenRLHF 0.11.2; rollouts come from SGLang servers under S3R, which this command "
        "starts. --vllm.num_engines is the number of servers, --vllm.tensor_parallel_size the GPUs of each.",
    )
    add = result.add_argument_group("S3R").add_argument
    add(
        "--s3r.engine_python",
        default=os.environ.get("S3R_ENGINE_PYTHON"),
        metavar="PATH",
        help="Python of the environment that has SGLang and s3r-sglang; default: the one that ran `s3r-openrlhf "
        "setup`, or $S3R_ENGINE_PYTHON",
    )
    add(
        "--s3r.mode",
        choices=MODES,
        default="exact",
        help="exact: S3R. autoregressive: the same servers without speculation. direct: sample from the sparse "
        "policy, which is not the policy that is trained; for comparisons only",
    )
    add("--s3r.config", metavar="NAME", help="S3R's YAML, a path or the name of a file in configs")
    add(
        "--s3r.server_args",
        type=shlex.split,
        default=[],
        metavar="ARGS",
        help="further arguments of the SGLang servers, in one word: --s3r.server_args='--s3r-budget-ratio 0.1'",
    )
    add("--s3r.port", type=int, metavar="N", help="server i listens on N + i; default: free ports")
    add(
        "--s3r.bucket_mib",
        type=int,
        default=512,
        metavar="N",
        help="weights are sent in buckets of N MiB (default: 512)",
    )
    add(
        "--s3r.restarts",
        type=int,
        default=3,
        metavar="N",
        help="how often a server that died is started again before the run stops (default: 3)",
    )
    add(
        "--s3r.start_timeout",
        type=float,
        default=1200.0,
        metavar="SECONDS",
        help="how long a server may take to start (default: 1200)",
    )
    add(
        "--s3r.log_dir",
        metavar="FOLDER",
        help="folder of the servers' logs (default: s3r_logs in --ckpt.output_dir)",
    )
    add(
        "--s3r.weight_sync",
        choices=("on", "off"),
        default="on",
        help="off: the servers keep the first weights. The negative control of an experiment: the KL between "
        "trainer and rollouts must show it",
    )
    add(
        "--s3r.correction",
        choices=("none", "sparse-rl"),
        default="none",
        help="sparse-rl: importance weights and rejection for rollouts of --s3r.mode direct",
    )
    return result


def parse(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Split a command line into our options and OpenRLHF's arguments.

    Raises:
        SystemExit: a wrong `--s3r.*` flag or value; argparse has printed one sentence.
    """
    flags = parser()
    known, rest = flags.parse_known_args(list(argv))
    for word in rest:
        if word.startswith(("--s3r.", "--s3r-")):
            _unknown(flags, word.split("=", 1)[0])
    values = {name.removeprefix("s3r."): value for name, value in vars(known).items()}
    for name in ("bucket_mib", "start_timeout"):
        if values[name] <= 0:
            flags.error(f"argument --s3r.{name}: must be positive")
    if values["restarts"] < 0:
        flags.error("argument --s3r.restarts: must not be negative")
    values["weight_sync"] = values["weight_sync"] == "on"
    values["correction"] = None if values["correction"] == "none" else values["correction"]
    if values["correction"] and values["mode"] != "direct":
        flags.error("argument --s3r.correction: only rollouts of --s3r.mode direct need a correction")
    return Options(**values), rest


def _unknown(flags: argparse.ArgumentParser, word: str) -> NoReturn:
    known = [action.option_strings[0] for action in flags._actions]
    if word.startswith("--s3r-"):
        flags.error(f"{word} is a flag of the server: give it in --s3r.server_args")
    close = difflib.get_close_matches(word, known, 1, cutoff=0.75)
    flags.error(f"unknown flag {word}" + (f"; did you mean {close[0]}?" if close else ""))
