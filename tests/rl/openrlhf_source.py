"""The source of OpenRLHF 0.11.2, for tests against its own parser, loss and data set class.

Taken from the trainer's environment, or else from its wheel; neither Ray nor DeepSpeed are needed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

VERSION = "0.11.2"


@cache
def find():
    """Folder that holds the package `openrlhf`; skips the test if it cannot be had."""
    home = Path(os.environ.get("S3R_HOME", "~/.cache/s3r")).expanduser()
    for site in home.glob("openrlhf/lib/python3.*/site-packages"):
        if (site / f"openrlhf-{VERSION}.dist-info").is_dir():
            return site
    folder = home / f"openrlhf-source-{VERSION}"
    if not folder.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            _unpack_wheel(Path(scratch))
            # Another test process may have been faster.
            with contextlib.suppress(OSError):
                (Path(scratch) / "package").rename(folder)
    return folder


def _unpack_wheel(scratch):
    """Install the wheel alone to `scratch`/package; it is tagged for CPython 3.11, but holds pure Python."""
    if uv := shutil.which("uv"):
        install = [uv, "pip", "install", "--only-binary", ":all:"]
    else:
        subprocess.run([sys.executable, "-m", "venv", str(scratch / "venv")], check=True, capture_output=True)
        install = [str(scratch / "venv" / "bin" / "pip"), "install", "--only-binary=:all:"]
    install += ["--quiet", "--no-deps", "--python-version", "3.11", "--target", str(scratch / "package")]
    done = subprocess.run([*install, f"openrlhf=={VERSION}"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"OpenRLHF's wheel cannot be had: {done.stderr[-300:]}")
