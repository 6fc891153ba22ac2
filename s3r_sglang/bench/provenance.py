"""Where and with what a measurement was made: the head of every report."""

import contextlib
import datetime
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from s3r_sglang import cpu

VERSIONS = ("s3r-sglang", "sglang", "torch", "triton", "transformers", "sgl-kernel", "flashinfer-python")


def collect() -> dict[str, Any]:
    """Time, command line, commit, machine and versions, under the names that reports have for them."""
    return {
        "created": now(),
        "command": shlex.join(["s3r", *sys.argv[1:]]),
        "git_commit": git_commit(),
        "machine": _machine(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _machine() -> dict[str, Any]:
    import torch

    if not cpu.has_gpu():
        return {"device": f"CPU ({platform.machine()})", "count": torch.get_num_threads()}
    return {"device": torch.cuda.get_device_name(), "count": torch.cuda.device_count()}


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def git_commit() -> str:
    """Commit of the checkout that this package runs from, marked if it has changes.

    A copy without `.git` is named by the environment variable S3R_COMMIT.
    """
    if "S3R_COMMIT" in os.environ:
        return os.environ["S3R_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
