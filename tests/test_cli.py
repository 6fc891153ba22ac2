"""The `s3r` command: arguments, defaults by device, refusals, and the doctor's findings."""

import collections
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest
from s3r_testing import free_port, random_llama, server_process, wait_until, write_word_tokenizer
from typer.testing import CliRunner

from s3r_sglang import cpu, doctor, launch, models
from s3r_sglang.cli import app
from s3r_sglang.config import S3RConfig, flag_of
from s3r_sglang.faults import nearest

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


def test_the_model_may_come_first_without_its_flag():
    assert launch.arguments(["m", "--tp", "2"], on_gpu=True)[:4] == ["--model-path", "m", "--tp", "2"]
    assert launch.arguments([], on_gpu=True) == ["--speculative-algorithm", "self-sparse"]


@pytest.mark.parametrize("given", [["--speculative-algorithm", "NGRAM"], ["--speculative-algorithm=NGRAM"]])
def test_what_the_user_says_wins(given):
    assert launch.arguments(given, on_gpu=True) == given


def test_an_autoregressive_engine_drops_what_concerns_speculation():
    given = ["--s3r-budget-ratio", "0.1", "--tp", "2", "--speculative-num-steps=4", "--s3r-seed", "-1", "--x"]
    assert launch.arguments(given, on_gpu=True, speculative=False) == ["--tp", "2", "--x"]


def test_a_wrong_setting_is_refused_before_sglang_is_imported():
    result = invoke("serve", "--model-path", "nowhere", "--s3r-kv-policy", "lru")
    assert result.exit_code == 1
    assert "kv_policy" in result.output
    assert "'lru'" in result.output


def test_a_bad_prompt_file_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"id": 1}\n')
    words = ["--model", tmp_path, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl"]
    result = invoke("rollout", *words)
    assert result.exit_code == 1
    assert result.output.endswith("p.jsonl:1: needs exactly one of prompt, messages and token_ids.\n")
    assert result.output.count("\n") == 1
    assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--top-p", 0], "top_p: must be greater than 0."),
        (["--top-k", 0], "top_k must be -1 (off) or at least 1."),
        (["--temperature", 1000], "temperature: must be less than or equal to 100."),
    ],
)
def test_sampling_parameters_are_checked_before_anything_starts(tmp_path, words, says):
    (tmp_path / "p.jsonl").write_text('{"id": 1, "prompt": "x"}\n')
    files = ["--model", tmp_path, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl"]
    result = invoke("rollout", *files, *words)
    assert (result.exit_code, result.output) == (1, f"error: {says}\n")
    assert not (tmp_path / "o.jsonl").exists()


def test_the_prompts_are_not_overwritten_by_the_responses(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"id": 1, "prompt": "x"}\n')
    files = ["--model", tmp_path, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "p.jsonl"]
    result = invoke("rollout", *files, "--force")
    assert result.exit_code == 1
    assert "is the file of the prompts" in result.output
    assert (tmp_path / "p.jsonl").read_text().startswith('{"id": 1')


def test_what_looks_like_markup_is_printed_as_it_is(tmp_path):
    words = ["--model", tmp_path, "--prompts", tmp_path / "[red]p[/x].jsonl", "--out", tmp_path / "o.jsonl"]
    result = invoke("rollout", *words)
    assert result.exit_code == 1
    assert result.output == f"error: {tmp_path}/[red]p[/x].jsonl does not exist\n"


def test_a_misspelt_option_is_not_passed_on(tmp_path):
    words = ["--model", tmp_path, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl"]
    result = invoke("rollout", *words, "--temprature", 1)
    assert result.exit_code == 1
    assert result.output == "error: unknown flag '--temprature'; did you mean '--temperature'?\n"
    result = invoke("rollout", *words, "--quantization", "temperatur")
    assert "temperatur" not in result.output


@pytest.mark.slow
def test_no_flag_of_sglang_is_taken_for_a_misspelt_option():
    """Also guards `similar` in `refuse_misspelt`."""
    from sglang.srt.server_args import ServerArgs

    options = [
        "--model",
        "--prompts",
        "--out",
        "--group-size",
        "--max-new-tokens",
        "--temperature",
        "--top-p",
    ]
    options += ["--top-k", "--seed", "--concurrency", "--compare", "--force"]
    for field in dataclasses.fields(ServerArgs):
        flag = "--" + field.name.replace("_", "-")
        assert nearest(flag, options, similar=0.85) in (None, flag)


@pytest.mark.parametrize("name", ["o.jsonl", "o.autoregressive.jsonl"])
def test_results_are_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text("precious")
    words = ["--model", tmp_path, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl"]
    result = invoke("rollout", *words, "--compare")
    assert result.exit_code == 1
    assert f"{name} exists; give another --out, or --force" in result.output
    assert (tmp_path / name).read_text() == "precious"


@pytest.mark.slow
def test_ctrl_c_in_a_rollout_keeps_the_groups_that_are_complete(tmp_path):
    random_llama().save_pretrained(tmp_path / "model")
    write_word_tokenizer(tmp_path / "model")
    prompts = [{"id": i, "token_ids": [5, 6, 7], "max_new_tokens": 4 if i < 3 else 240} for i in range(99)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    out = tmp_path / "o.jsonl"
    words = ["--model", tmp_path / "model", "--prompts", tmp_path / "p.jsonl", "--out", out]
    words += ["--group-size", "2", "--concurrency", "2"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            # A shell starts what runs in its background deaf to Ctrl-C, these tests perhaps.
            ["env", "--default-signal=INT", *S3R, "rollout", *words],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    wait_until(lambda: out.exists() and out.read_text(), seconds=300)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows
    assert collections.Counter(row["prompt_id"] for row in rows) == {row["prompt_id"]: 2 for row in rows}
    said = (tmp_path / "log").read_text()
    assert f"stopped: {out} holds the groups that were complete" in said
    assert "Traceback" not in said
    assert ended(family)


def test_an_empty_file_of_an_interrupted_run_is_no_result(tmp_path):
    (tmp_path / "o.jsonl").touch()
    (tmp_path / "p.jsonl").write_text('{"id": 1, "prompt": "x"}\n')
    words = ["--model", tmp_path / "m", "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl"]
    result = invoke("rollout", *words)
    assert result.exit_code == 1
    assert result.output.startswith(f"error: {tmp_path}/m is not a model folder")


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
    assert done.stderr.startswith("importing PyTorch and SGLang, which takes up to a minute\n")
    assert "0 of " in done.stderr or "is not wrapped" in done.stderr
    assert "-> another plugin may be in the way" in done.stderr


@pytest.mark.slow
def test_serve_speculates_without_being_told_more_than_the_model_and_ends_at_ctrl_c(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    port, log = free_port(), tmp_path / "log"
    command = [*S3R, "serve", "--port", str(port), "--model-path", str(models.fetch("smollm2"))]
    with server_process(command, port, log, ready="/health") as (process, url):
        sampling = {"max_new_tokens": 16, "temperature": 0}
        answer = httpx.post(
            f"{url}/generate",
            json={"text": "The capital of France is", "sampling_params": sampling},
            timeout=120,
        ).json()
        # What a terminal does: every process of the foreground gets the signal.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
    assert answer["text"].startswith(" Paris")
    assert answer["meta_info"]["completion_tokens"] == 16
    assert answer["meta_info"]["s3r_accept_length"] > 1
    assert "Shutting down" in log.read_text()
    assert "Traceback" not in log.read_text()


def starting_server(log, until):
    """`s3r serve` in a session of its own, which has come as far as `until(its processes, its log)`."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [*S3R, "serve", "--port", str(free_port()), "--model-path", str(models.fetch("smollm2"))],
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        with contextlib.suppress(psutil.Error):  # short-lived ones
            if until([one.cmdline() for one in family], log.read_text()):
                return process, family
        time.sleep(0.05)
    pytest.fail(log.read_text())


def ended(processes):
    """Whether none of them runs any more, a moment from now."""
    _, alive = psutil.wait_procs(processes, timeout=5)
    return all(one.status() == psutil.STATUS_ZOMBIE for one in alive)


@pytest.mark.slow
@pytest.mark.parametrize(
    "until",
    [
        # Imports that catch everything used to swallow it.
        lambda commands, log: "s3r_sglang.commands.serve" in commands[0] and len(commands) > 1,
        lambda commands, log: "Load weight begin" in log,
    ],
    ids=["importing", "loading"],
)
def test_ctrl_c_while_the_server_starts_is_one_line(tmp_path, until):
    process, family = starting_server(tmp_path / "log", until)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert (tmp_path / "log").read_text().rstrip().endswith("stopped before the server was ready")
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert ended(family[1:])


@pytest.mark.slow
def test_a_server_that_is_killed_while_its_processes_start_leaves_none_behind(tmp_path):
    process, family = starting_server(
        tmp_path / "log",
        lambda commands, log: sum("--multiprocessing-fork" in command for command in commands) > 1,
    )
    process.kill()
    process.wait()
    assert ended(family[1:])


def test_serves_help_lists_the_flags_of_s3r():
    output = invoke("serve", "--help").output
    for name in S3RConfig.model_fields:
        assert flag_of(name) in output


def test_a_misspelt_model_gets_one_line():
    result = invoke("model", "fetch", "smolm2")
    assert result.exit_code == 1
    assert result.output.strip() == "error: unknown model 'smolm2'; did you mean 'smollm2'?"


@pytest.mark.parametrize(
    "argv", [["--s3r-mode", "direct"], ["--s3r-mode=direct"], ["--s3r-config", "{yaml}"]]
)
def test_compare_refuses_responses_of_another_law(tmp_path, argv):
    (tmp_path / "direct.yaml").write_text("mode: direct\n")
    argv = [word.format(yaml=tmp_path / "direct.yaml") for word in argv]
    words = [
        "--model",
        tmp_path,
        "--prompts",
        tmp_path / "p.jsonl",
        "--out",
        tmp_path / "o.jsonl",
        "--compare",
    ]
    result = invoke("rollout", *words, *argv)
    assert result.exit_code == 1
    assert result.output.endswith("have another: drop one of the two\n")
