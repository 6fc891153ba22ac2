"""Shared set-up: on a machine without a GPU, SGLang runs with the CPU stand-in, in child processes too."""

import importlib.util
import logging
import os
import pkgutil
from pathlib import Path

import pytest
import torch

from s3r_sglang import cpu

if not torch.cuda.is_available():
    cpu.prepare()

# Each engine imports the files of all models that SGLang knows: 4 s of CPU time. The tests run models of these.
MODELS = {"llama", "qwen2", "qwen3"}
sglang = Path(importlib.util.find_spec("sglang").origin).parent
others = {module.name for module in pkgutil.iter_modules([str(sglang / "srt" / "models")])} - MODELS
os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(sorted(others)))

# `sgl.Engine` shuts down once more at exit and logs it, to a stream that pytest has closed by then.
logging.raiseExceptions = False


# What takes longest comes first, so that no worker is left alone with it at the end.
FIRST = ["tests/rl/test_openrlhf.py", "tests/rl", "tests/e2e/test_real_model.py", "tests/e2e"]
# Files of rl/ that end the servers that they start.
OWN_SERVERS = {f"tests/rl/test_{name}.py" for name in ("openrlhf", "smollm2", "grpo_example")}


def pytest_collection_modifyitems(items):
    def place(item):
        starts = [item.nodeid.startswith(prefix) for prefix in FIRST]
        return starts.index(True) if any(starts) else len(FIRST)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Side by side, a file stays with one worker, and most of rl/ with one: its files share servers.

    Between two of its files no engine may run in that process: SGLang's shutdown of one ends all children of the
    process, the servers among them. Not by the mark `xdist_group`: xdist 3.8 does not see it under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FilesThatShareServers(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.split("::")[0]
            shares = path.startswith("tests/rl/") and path not in OWN_SERVERS
            return "tests/rl" if shares else path

    config.option.loadscopereorder = False  # by number of tests
    return FilesThatShareServers(config, log)
