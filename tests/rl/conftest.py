"""Real servers with a tiny random Llama, shared by the tests of this folder."""

import sys
from pathlib import Path

import pytest

# With --import-mode=importlib a test folder is not on the search path, and support.py is this folder's only.
sys.path.insert(0, str(Path(__file__).parent))

from support import Server, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """(folder, transformers model) of the weights that the servers start with."""
    folder = tmp_path_factory.mktemp("model")
    return folder, write_model(folder)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory):
    """(folder, transformers model) of the same architecture with other weights."""
    folder = tmp_path_factory.mktemp("other-model")
    return folder, write_model(folder, seed=1)


@pytest.fixture(scope="session")
def start(model, tmp_path_factory):
    """Factory of servers of the random Llama: `start(*flags)`; all are killed at the end."""
    servers = []

    def factory(*flags, **options):
        servers.append(Server(model[0], tmp_path_factory.mktemp("server"), *flags, **options))
        return servers[-1]

    yield factory
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def server(start):
    """One server, shared by the tests; whoever changes its weights changes them back."""
    return start("--enable-metrics", env={"S3R_MAX_GROUPS": "64", "S3R_MAX_BODY_BYTES": "1000000"}).wait()


@pytest.fixture(scope="module")
def locked(start):
    """A server with two API keys; ended with its module, because a server takes 3 GB."""
    server = start("--api-key", "user-key", "--admin-api-key", "admin-key").wait(key="user-key")
    yield server
    server.kill()
