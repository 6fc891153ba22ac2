"""Schemathesis on the OpenAPI description of our routes, against a real server: no undocumented answer."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from s3r_sglang.rl_integration.weights import WeightSender
from support import groups

pytestmark = pytest.mark.slow

# JSON Schema cannot say all that makes a request valid: distinct ids, token ids within the vocabulary, a prompt
# that fits the context, a session that is open. So a request that fits the schema may still be refused.
EXCLUDED = "positive_data_acceptance"
EXAMPLES = 40


def fuzz(server, folder, paths, seconds):
    """Run the command; its output names every failed check with a curl line that repeats it."""
    pytest.importorskip("schemathesis")
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json"]
    command += [
        "--include-path-regex",
        paths,
        "--max-time",
        str(seconds),
        "--checks",
        "all",
        "--exclude-checks",
        EXCLUDED,
    ]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES)]
    command += ["--seed", "1", "--generation-database", "none", "--request-timeout", "60", "--no-color"]
    hooks = Path(__file__).with_name("schemathesis_hooks.py")
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(hooks)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=folder)


def test_fuzzing_the_routes_finds_nothing(server, tmp_path):
    done = fuzz(server, tmp_path, "^/s3r/(rollout|stats|ready|weights)$", seconds=20)
    assert done.returncode == 0, done.stdout[-8000:]
    assert "4 selected" in done.stdout, done.stdout[-2000:]
    assert len(groups(server)) == 1


def test_fuzzing_an_update_session_finds_nothing(server, model, tmp_path):
    """By itself: an open session holds rollouts back until it is committed, which random keys do not."""
    done = fuzz(server, tmp_path, "^/s3r/weights/", seconds=8)
    WeightSender(server.url).send_path(model[0], "first")
    assert done.returncode == 0, done.stdout[-8000:]
    assert httpx.get(f"{server.url}/s3r/ready", timeout=60).status_code == 200
    assert len(groups(server)) == 1
