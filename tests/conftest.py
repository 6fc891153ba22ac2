"""Shared set-up: on a machine without a GPU, SGLang runs with the CPU stand-in, in child processes too."""

import logging

import pytest
import torch

from s3r_sglang import cpu

if not torch.cuda.is_available():
    cpu.prepare()

# `sgl.Engine` shuts down once more at exit and logs it, to a stream that pytest has closed by then.
logging.raiseExceptions = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Side by side, a file stays with one worker, and all of rl/ with one: its files share servers.

    Between two of its files no engine may run in that process: SGLang's shutdown of one ends all children of the
    process, the servers among them. Not by the mark `xdist_group`: xdist 3.8 does not see it under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FilesThatShareServers(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.split("::")[0]
            return "tests/rl" if path.startswith("tests/rl/") else path

    return FilesThatShareServers(config, log)
