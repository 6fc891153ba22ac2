"""The GRPO example, run as its own command against a real server: the reward goes up, the policies agree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from s3r_sglang.rl_integration.weights import WeightSender

EXAMPLE = Path(__file__).parents[2] / "rl_integration" / "examples" / "grpo.py"


@pytest.mark.slow
def test_the_reward_improves_and_trainer_and_server_agree(server, model):
    command = [sys.executable, str(EXAMPLE), "--url", server.url, "--model", str(model[0]), "--steps", "20"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    finally:
        WeightSender(server.url).send_path(model[0], "first")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 20
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[:3]) / 3 == pytest.approx(0.5, abs=0.1)
    assert sum(rewards[-3:]) / 3 > 0.75
    # The server's logprobs are those of the trainer's own forward after every update: the ratio starts at 1.
    assert max(row["mismatch"] for row in rows) < 1e-3
    assert min(row["accept_length"] for row in rows) > 1
