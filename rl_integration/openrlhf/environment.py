"""The trainer's environment: `s3r-openrlhf setup` makes it, and it remembers the engine's Python."""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

from s3r_sglang.rl_integration.openrlhf.options import Options

# In the root of the trainer's environment.
RECORD = "s3r.json"
OPENRLHF = "openrlhf==0.11.2"
# OpenRLHF's pin, what we import ourselves, and what our reward functions use.
PACKAGES = [OPENRLHF, "transformers==5.15.0", "httpx", "pydantic>=2.7", "pyyaml", "ninja", "math-verify"]
# Needs a compiler and a GPU to build; OpenRLHF uses it for packing and its default attention alone.
WITHOUT = "flash-attn"


class SetupError(RuntimeError):
    """The environment cannot be made or used; the message says what to do."""


def default_folder() -> Path:
    """Where `setup` puts the environment: $S3R_HOME or ~/.cache/s3r, openrlhf."""
    return Path(os.environ.get("S3R_HOME", "~/.cache/s3r")).expanduser() / "openrlhf"


def python_of(folder: Path) -> Path:
    """The interpreter of the environment in `folder`."""
    return folder / "bin" / "python"


def setup(argv: Sequence[str]) -> None:
    """Make the trainer's environment for this one as the engine's.

    torch is the engine's: members of one NCCL group need the same NCCL.

    Raises:
        SetupError: something is in the way, or an installer failed.
    """
    parser = argparse.ArgumentParser(prog="s3r-openrlhf setup", description="Make the trainer's environment.")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="default: %(default)s")
    folder = parser.parse_args(argv).folder.absolute()
    python = python_of(folder)
    torch = f"torch=={metadata.version('torch').split('+')[0]}"
    source, editable = _our_source()
    ours = ["--no-deps", *(["--editable"] if editable else []), source]
    uv = _uv(folder)
    if not python.exists():
        _run(uv, "venv", "--quiet", "--seed", "--python", sys.executable, str(folder))
    print(
        f"installing OpenRLHF, DeepSpeed, Ray and PyTorch in {folder}: minutes", file=sys.stderr, flush=True
    )
    install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.write(f"{WITHOUT}; sys_platform == 'never'\n{torch}\n")
        overrides.flush()
        _run(*install, "--overrides", overrides.name, torch, *PACKAGES)
    _run(*install, *ours)
    (folder / RECORD).write_text(json.dumps({"engine_python": sys.executable}) + "\n")
    print(folder)


def _uv(folder: Path) -> str:
    """uv, which can leave a requirement out and pip cannot; beside `folder` if it is not installed."""
    if found := shutil.which("uv"):
        return found
    own = folder.with_name(folder.name + "-uv")
    if not (own / "bin" / "uv").exists():
        _run(sys.executable, "-m", "venv", str(own))
        _run(str(python_of(own)), "-m", "pip", "install", "--quiet", "uv")
    return str(own / "bin" / "uv")


def _our_source() -> tuple[str, bool]:
    """What to install this package from, and whether in place.

    Raises:
        SetupError: the folder that it was installed from is not there any more.
    """
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").exists():
        return str(checkout), True
    record = json.loads(metadata.distribution("s3r-sglang").read_text("direct_url.json") or "{}")
    url = urlparse(record.get("url", ""))
    path = unquote(url.path)
    if url.scheme != "file" or not Path(path).exists():
        raise SetupError(
            f"s3r-sglang was installed from {path or 'an index'}, which is not there to install from"
        )
    return path, False


def _run(*command: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # DeepSpeed compiles its kernels when they are first used.
    environ["DS_BUILD_OPS"] = "0"
    if subprocess.run(command, env=environ, check=False).returncode:
        raise SetupError(f"failed: {' '.join(command)}")


def with_engine(options: Options) -> Options:
    """`options` with the engine's Python: the flag's, or the one that made this environment.

    Raises:
        SetupError: there is none, or it cannot run the engine.
    """
    record = Path(sys.prefix) / RECORD
    python = options.engine_python
    if python is None and record.exists():
        python = json.loads(record.read_text())["engine_python"]
    if python is None:
        raise SetupError(
            "give --s3r.engine_python, the Python of the environment that has SGLang and s3r-sglang"
        )
    if shutil.which(python) is None:
        raise SetupError(f"the engine's Python {python} does not exist")
    return dataclasses.replace(options, engine_python=python)
