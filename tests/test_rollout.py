"""Prompt files and the rollout job: order, seeds, totals, and what happens when a response fails."""

import asyncio
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import TextColumn

from s3r_sglang import models, prompts, report, rollout
from s3r_sglang.prompts import EncodedPrompt, PromptError
from s3r_sglang.requests import seed_of_sample
from s3r_sglang.rollout import Job, Response, RolloutError, Summary
from s3r_sglang.server.protocol import Prompt, group_seed

DEMO = Path(prompts.__file__).parent / "data" / "demo_prompts.jsonl"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "Invalid JSON"),
        ("[1]", "must be an object"),
        ('{"prompt": "x"}', "id: is missing"),
        ('{"id": true, "prompt": "x"}', "id: must be a non-empty string or an integer"),
        ('{"id": 1}', "exactly one of prompt, messages and token_ids"),
        ('{"id": 1, "prompt": "x", "token_ids": [1]}', "exactly one of prompt, messages and token_ids"),
        ('{"id": 1, "prompt": ""}', "prompt: String should have at least 1 character"),
        ('{"id": 1, "messages": [{"role": "user"}]}', r"messages\.0\.content: is missing"),
        ('{"id": 1, "token_ids": [1, -2]}', r"token_ids\.1: must be greater than or equal to 0"),
        ('{"id": 1, "token_ids": [1, true]}', r"token_ids\.1: must be a valid integer"),
        ('{"id": 1, "promt": "x"}', "unknown field 'promt'; did you mean 'prompt'"),
        ('{"id": 1, "prompt": "x", "label": "4"}', "unknown field 'label'; known: answer, .*metadata"),
        ('{"id": 0, "prompt": "x"}', "id 0 was used before, at .*:1"),
        (
            '{"id": 1, "prompt": "x", "answer": "1", "metadata": {"answer": "2"}}',
            "answer and metadata.answer differ: drop one of the two",
        ),
        (
            '{"id": 1, "prompt": "x", "datasource": "a", "metadata": {"datasource": null}}',
            "datasource and metadata.datasource differ: drop one of the two",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, fault):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": 0, "prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(PromptError, match=fault) as error:
        prompts.load(path)
    assert str(error.value).startswith(f"{path}:3: ")


def test_an_empty_or_missing_file_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(PromptError, match="holds no prompts"):
        prompts.load(tmp_path / "empty.jsonl")
    with pytest.raises(PromptError) as error:
        prompts.load(tmp_path / "missing.jsonl")
    assert str(error.value) == f"{tmp_path}/missing.jsonl does not exist"
    with pytest.raises(PromptError) as error:
        prompts.load(tmp_path)
    assert str(error.value) == f"{tmp_path}: cannot be read (Is a directory)"


def test_what_trainers_read_goes_into_the_metadata(tmp_path):
    lines = [
        {"id": 1, "prompt": "x", "answer": 4, "datasource": "sums", "metadata": {"level": 2}},
        {"id": 2, "prompt": "x", "answer": None},
        {"id": 3, "prompt": "x"},
        {"id": 4, "prompt": "x", "answer": 4, "metadata": {"answer": 4}},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [row.prompt.metadata for row in prompts.load(tmp_path / "prompts.jsonl")] == [
        {"level": 2, "answer": 4, "datasource": "sums"},
        {"answer": None},
        None,
        {"answer": 4},
    ]


def test_the_demo_prompts_load():
    rows = [row.prompt for row in prompts.load(DEMO)]
    assert [row.id for row in rows] == ["bus", "garden", "paint", "average", "python-execution-model"]
    assert len(rows[-1].messages[0].content) > 12_000


def words(text: str) -> SimpleNamespace:
    return SimpleNamespace(input_ids=[len(word) for word in text.split()])


class Tokenizer:
    """A word becomes its length; enough of the interface of transformers for `encode`."""

    chat_template = None

    def __call__(self, text):
        return words(text)

    def __len__(self):
        return 10


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"token_ids": [3, 10]}, "f:1: token id 10 is outside the vocabulary of 10"),
        ({"token_ids": [1] * 9}, "f:1: 9 prompt tokens and 8 new ones exceed the 16 positions"),
        ({"token_ids": [1], "max_new_tokens": 16}, "f:1: 1 prompt tokens and 16 new ones exceed"),
        ({"prompt": " "}, "f:1: the prompt has no tokens"),
        ({"messages": [{"role": "user", "content": "x"}]}, "f:1: the model has no chat template"),
    ],
)
def test_a_prompt_that_does_not_fit_the_model_is_refused(fields, fault):
    row = prompts.Row("f:1", Prompt.model_validate({"id": 1, **fields}))
    with pytest.raises(PromptError, match=fault):
        prompts.encode([row], Tokenizer(), context_length=16, max_new_tokens=8)


def test_a_chat_that_the_template_refuses_is_named_by_its_line():
    class Strict(Tokenizer):
        chat_template = "…"

        def apply_chat_template(self, messages, **_):
            raise ValueError(f"no {messages[0]['role']}")

    messages = [{"role": "tool", "content": "x"}]
    row = prompts.Row("f:3", Prompt.model_validate({"id": 1, "messages": messages}))
    with pytest.raises(PromptError, match=r"f:3: the chat template refuses the messages \(no tool\)"):
        prompts.encode([row], Strict(), context_length=16, max_new_tokens=8)


def test_text_and_token_ids_are_encoded_and_keep_what_concerns_their_responses():
    forms = [
        {"id": "a", "prompt": "one three", "metadata": {"answer": 4}},
        {"id": "b", "token_ids": [9] * 8, "max_new_tokens": 2, "seed": 7},
    ]
    rows = [prompts.Row("f:1", Prompt.model_validate(fields)) for fields in forms]
    assert prompts.encode(rows, Tokenizer(), context_length=16, max_new_tokens=8) == [
        EncodedPrompt("a", [3, 5], metadata={"answer": 4}),
        EncodedPrompt("b", [9] * 8, max_new_tokens=2, seed=7),
    ]


def job(group_size=3, seed=0, concurrency=256) -> Job:
    rows = [
        EncodedPrompt(name, [number + 1] * 4, metadata={"answer": name}) for number, name in enumerate("abcd")
    ]
    return Job(rows, group_size, {"max_new_tokens": 8, "temperature": 1.0}, seed, concurrency)


def test_seeds_differ_everywhere_and_do_not_depend_on_the_group_size():
    many = Job([EncodedPrompt(number, [1]) for number in range(64)], 64, {"max_new_tokens": 8})
    seeds = [many.seed_of(prompt, sample) for prompt in range(64) for sample in range(64)]
    assert len(set(seeds)) == 64 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert job(group_size=8).seed_of(2, 1) == job(group_size=2).seed_of(2, 1)
    assert job(seed=1).seed_of(2, 1) != job(seed=0).seed_of(2, 1)


def test_a_prompts_own_seed_and_limit_win():
    own = Job([EncodedPrompt("a", [1]), EncodedPrompt("b", [1], 3, 99)], 2, {"max_new_tokens": 8}, seed=5)
    assert own.sampling_of(1, 0) == {"max_new_tokens": 3, "sampling_seed": 99}
    assert own.sampling_of(0, 0) == {"max_new_tokens": 8, "sampling_seed": own.seed_of(0, 0)}
    assert own.seed_of(1, 1) != 99


def test_the_seeds_are_those_of_the_service():
    """The server seeds a group by `group_seed`, and sample i > 0 of it by `seed_of_sample`."""
    assert job(seed=6).seed_of(2, 0) == group_seed(6, 2)
    assert job(seed=6).seed_of(2, 3) == seed_of_sample(group_seed(6, 2), 3)


def test_totals_follow_from_the_histogram():
    summary = Summary(seconds=4.0)
    row = Response("a", 0, [1], [1] * 10, "", [0.0] * 10, "length", 3, 3.0, True, None)
    summary.add(row, [1, 0, 2])
    summary.add(row, [0, 0, 0, 1])
    assert (summary.responses, summary.tokens, summary.rounds) == (2, 20, 4)
    assert summary.histogram == [1, 0, 2, 1]
    assert summary.accept_length == 1 + 7 / 4
    assert summary.acceptance(3) == [0.75, 0.75, 0.25]
    assert summary.tokens_per_second == 5.0


def test_totals_without_speculation_have_no_accept_length():
    summary = Summary()
    summary.add(Response("a", 0, [1], [1], "", [0.0], "stop", None, None, True, None), [])
    assert summary.accept_length is None
    assert summary.tokens_per_second == 0.0


def test_the_table_compares_tokens_per_second():
    sparse = Summary(responses=2, tokens=90, seconds=2.0, histogram=[5, 0, 5])
    dense = Summary(responses=2, tokens=60, seconds=2.0)
    console = Console(width=120, file=io.StringIO())
    console.print(report.summary_table({"S3R": sparse, "autoregressive": dense}, draft_length=2))
    rows = {}
    for line in console.file.getvalue().splitlines():
        name, *cells = (cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│"))
        rows[name] = cells
    assert rows["tokens/s"] == ["45.0", "30.0", "1.50x"]
    assert rows["accept length τ (tokens per round)"][:2] == ["2.00", "-"]
    assert rows["mean draft acceptance"][:2] == ["50.0%", "-"]


def test_progress_is_a_line_now_and_then_where_the_output_is_no_terminal(monkeypatch):
    monkeypatch.setattr(report, "LINE_SECONDS", 0.01)
    console = Console(width=80, file=io.StringIO())
    lines = lambda: [line.rsplit(maxsplit=1)[0] for line in console.file.getvalue().splitlines() if line]  # noqa: E731
    with report.progress(console, TextColumn("responses, {task.fields[tokens]} tokens")) as bar:
        task = bar.add_task("S3R", total=3, tokens=0)
        bar.update(task, completed=1, tokens=40)
        deadline = time.monotonic() + 30
        while "S3R 1/3 responses, 40 tokens" not in lines() and time.monotonic() < deadline:
            time.sleep(0.01)
        bar.update(task, completed=3, tokens=90)
    assert "S3R 1/3 responses, 40 tokens" in lines()
    assert lines()[-1] == "S3R 3/3 responses, 90 tokens"


def test_on_a_terminal_progress_is_a_bar_and_no_lines(monkeypatch):
    monkeypatch.setattr(report, "LINE_SECONDS", 0.0)
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    with report.progress(console) as bar:
        bar.update(bar.add_task("S3R", total=2), completed=1)
        time.sleep(0.1)
    drawn = console.file.getvalue()
    assert "S3R ━━━━━━━━━━━━━━━━━━━━ " in drawn
    assert drawn.count("\n") == 1


def test_waiting_says_for_what():
    log, terminal = (
        Console(width=80, file=io.StringIO(), force_terminal=live, color_system=None)
        for live in (False, True)
    )
    with report.waiting(log, "starting [m]"):
        assert log.file.getvalue() == "starting [m]\n"
    with report.waiting(terminal, "starting [m]"):
        pass
    assert "⠋ starting [m]" in terminal.file.getvalue()
    assert terminal.file.getvalue().count("starting") == 1


class ScriptedEngine:
    """Answers requests in a set order, one of them with an abort: what no real engine does on cue."""

    def __init__(self, delays=(), aborts=()):
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = self
        self.delays, self.aborts = dict(delays), set(aborts)
        self.running = self.most_running = 0
        self.flushed = False

    async def flush_cache(self):
        self.flushed = True

    async def async_generate(self, input_ids, sampling_params, return_logprob=False):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        prompt = input_ids[0]
        for _ in range(self.delays.get(prompt, 1)):
            await asyncio.sleep(0)
        self.running -= 1
        failed = prompt in self.aborts and self.flushed
        reason = {"type": "abort", "message": "out of memory"} if failed else {"type": "stop"}
        logprobs = [(-0.5, 7, None), (-0.25, 8, None)]
        meta = {"finish_reason": reason, "output_token_logprobs": logprobs}
        return {"text": str(sampling_params.get("sampling_seed")), "meta_info": meta}


def test_the_rows_of_a_group_are_together_and_groups_come_as_they_finish():
    out, seen = io.StringIO(), []
    engine = ScriptedEngine(delays={1: 50})
    summary = rollout.run(engine, job(), out, seen.append)
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [row["prompt_id"] for row in rows] == list("bbbcccdddaaa")
    assert [row["group_index"] for row in rows] == [0, 1, 2] * 4
    assert rows[0] == {
        "prompt_id": "b",
        "group_index": 0,
        "prompt_token_ids": [2, 2, 2, 2],
        "token_ids": [7, 8],
        "text": str(job().seed_of(1, 0)),
        "logprobs": [-0.5, -0.25],
        "finish_reason": "stop",
        "rounds": None,
        "accept_length": None,
        "faithful": True,
        "metadata": {"answer": "b"},
    }
    assert len(seen) == summary.responses == 12
    assert engine.flushed


def test_no_more_responses_are_in_progress_than_asked_for():
    engine = ScriptedEngine()
    rollout.run(engine, job(concurrency=2))
    assert engine.most_running == 2


def test_an_incomplete_group_is_never_written():
    out = io.StringIO()
    with pytest.raises(RolloutError, match="prompt 'c', response 0: out of memory"):
        rollout.run(ScriptedEngine(delays={3: 50}, aborts={3}), job(), out)
    assert {json.loads(line)["prompt_id"] for line in out.getvalue().splitlines()} == {"a", "b", "d"}


@pytest.mark.slow
def test_the_command_writes_complete_groups_of_the_dense_policy(tmp_path):
    """Real engines: S3R and autoregressive on the same prompts; greedy, so that both give the same tokens."""
    questions = [
        {"id": 7, "prompt": "The capital of France is", "metadata": {"answer": "Paris"}},
        {"id": "b", "token_ids": [504, 3575, 282]},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    command = [sys.executable, "-c", "from s3r_sglang.cli import main; main()", "rollout"]
    command += ["--model", str(models.fetch("smollm2")), "--prompts", str(tmp_path / "prompts.jsonl")]
    command += ["--out", str(tmp_path / "out" / "rows.jsonl"), "--group-size", "2", "--max-new-tokens", "12"]
    command += ["--temperature", "0", "--compare", "--s3r-min-budget", "64", "--dtype", "float32"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [" ".join(line.split()) for line in done.stderr.splitlines()]
    for title in ("self-sparse", "autoregressive"):
        started = said.index(f"{title}: starting the engine for {models.fetch('smollm2')}")
        assert any(line.startswith(f"{title} 4/4 responses, 48 tokens 0:0") for line in said[started:])

    def read(name):
        return [json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()]

    rows, dense = read("rows.jsonl"), read("rows.autoregressive.jsonl")
    key = lambda row: (str(row["prompt_id"]), row["group_index"])  # noqa: E731
    assert sorted(map(key, rows)) == [("7", 0), ("7", 1), ("b", 0), ("b", 1)]
    assert {key(row): row["token_ids"] for row in rows} == {key(row): row["token_ids"] for row in dense}
    for row in rows:
        assert len(row["token_ids"]) == len(row["logprobs"]) == 12
        assert row["finish_reason"] == "length"
        assert row["rounds"] >= 2
        assert 1 <= row["accept_length"] <= 7
        asked = questions[0 if row["prompt_id"] == 7 else 1]
        assert row["metadata"] == asked.get("metadata")
        assert asked.get("token_ids") in (None, row["prompt_token_ids"])
    assert " Paris" in rows[[row["prompt_id"] for row in rows].index(7)]["text"]
    words = (
        "autoregressive",
        "ratio",
        "Acceptance by draft position",
        "7 [0]:",
        "KV of replica 0: aimd, limit",
    )
    for words_of_the_summary in words:
        assert words_of_the_summary in done.stdout
