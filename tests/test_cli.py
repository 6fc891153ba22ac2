"""The `s3r` command: arguments, defaults by device, refusals, and the doctor's findings."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from typer.testing import CliRunner

from s3r_sglang import cpu, doctor, launch, models
from s3r_sglang.cli import app

S3R = [sys.executable, "-c", "from s3r_sglang.cli import main; main()"]


def invoke(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def test_help_names_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in ("serve", "rollout", "doctor", "model"))


def test_the_device_decides_the_defaults():
    on_cpu = launch.arguments(["--model-path", "m"], on_gpu=False)
    assert on_cpu[:4] == ["--model-path", "m", "--speculative-algorithm", "self-sparse"]
    assert on_cpu[on_cpu.index("--attention-backend") + 1] == "torch_native"
    assert "--disable-overlap-schedule" in on_cpu
    assert ("--dtype" in on_cpu) != cpu.has_bf16()
    assert launch.arguments(["--model-path", "m"], on_gpu=True) == on_cpu[:4]


@pytest.mark.parametrize("given", [["--speculative-algorithm", "NGRAM"], ["--speculative-algorithm=NGRAM"]])
def test_what_the_user_says_wins(given):
    assert launch.arguments(given, on_gpu=True) == given


def test_an_autoregressive_engine_drops_what_concerns_speculation():
    given = ["--s3r-budget-ratio", "0.1", "--tp", "2", "--speculative-num-steps=4", "--s3r-seed", "-1", "--x"]
    assert launch.arguments(given, on_gpu=True, speculative=False) == ["--tp", "2", "--x"]


def test_an_unknown_model_is_refused():
    result = invoke("model", "fetch", "gpt2")
    assert result.exit_code == 1
    assert "unknown model 'gpt2'" in result.output


def test_a_bad_prompt_file_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"id": 1}\n')
    words = ["--model", tmp_path, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl"]
    result = invoke("rollout", *words)
    assert result.exit_code == 1
    assert "p.jsonl:1: needs exactly one of" in result.output.replace("\n", "")
    assert not (tmp_path / "o.jsonl").exists()


def test_results_are_not_overwritten(tmp_path):
    (tmp_path / "o.jsonl").write_text("precious")
    words = ["--model", tmp_path, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl"]
    result = invoke("rollout", *words)
    assert result.exit_code == 1
    assert "--force" in result.output
    assert (tmp_path / "o.jsonl").read_text() == "precious"


def test_the_doctor_knows_the_pinned_versions():
    found = {check.name: check for check in doctor.checks_of_requirements()}
    assert found["sglang"].ok
    assert found["sglang"].detail == "0.5.17"
    assert {"sglang", "torch", "transformers"} <= set(found)


def test_the_doctor_sees_a_plugin_switched_off(monkeypatch):
    assert doctor.check_entry_point().ok
    monkeypatch.setenv("SGLANG_PLUGINS", "other, more")
    check = doctor.check_entry_point()
    assert not check.ok
    assert "leaves it out" in check.detail
    assert "add s3r to SGLANG_PLUGINS" in check.remedy


@pytest.mark.slow
def test_the_doctor_fails_when_hooks_are_missing():
    environ = {**os.environ, "SGLANG_PLUGINS": "other"}
    done = subprocess.run([*S3R, "doctor"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "0 of " in done.stderr or "is not wrapped" in done.stderr
    assert "-> another plugin may be in the way" in done.stderr


@contextlib.contextmanager
def serving(*words):
    """`s3r serve` on a free port, until it answers; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [*S3R, "serve", "--port", str(port), "--log-level", "error", *words]
    server = subprocess.Popen(command, env=environ, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 400
        while True:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not come up"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            time.sleep(1)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.slow
def test_serve_speculates_without_being_told_more_than_the_model():
    with serving("--model-path", str(models.fetch("smollm2"))) as url:
        sampling = {"max_new_tokens": 16, "temperature": 0}
        answer = httpx.post(
            f"{url}/generate",
            json={"text": "The capital of France is", "sampling_params": sampling},
            timeout=120,
        ).json()
    assert answer["text"].startswith(" Paris")
    assert answer["meta_info"]["completion_tokens"] == 16
    assert answer["meta_info"]["s3r_accept_length"] > 1
