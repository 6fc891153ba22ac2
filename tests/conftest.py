"""Shared set-up: on a machine without a GPU, SGLang runs with the CPU stand-in, in child processes too."""

import logging
from pathlib import Path

import pytest
import torch

from s3r_sglang import cpu

if not torch.cuda.is_available():
    cpu.prepare()

# `sgl.Engine` shuts down once more at exit and logs it, to a stream that pytest has closed by then.
logging.raiseExceptions = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Side by side, a file stays with one worker, and all of rl/ with one: its files share servers.

    Between two of its files no engine may run in that process: SGLang's shutdown of one ends all children of the
    process, the servers among them.
    """
    shared = Path(__file__).parent / "rl"
    for item in items:
        group = shared if shared in item.path.parents else item.path
        item.add_marker(pytest.mark.xdist_group(str(group)))
