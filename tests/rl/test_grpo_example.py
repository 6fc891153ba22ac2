"""The GRPO example: its objective, its tasks, and the comparison of rollouts on real servers."""

import json
import subprocess
import sys

import pytest
import torch
from s3r_sglang.rl_integration.client import PlacedGroup
from s3r_sglang.rl_integration.data.prepare import prepare
from s3r_sglang.rl_integration.examples import compare, grpo, objective
from s3r_sglang.rl_integration.examples.objective import Sample
from s3r_sglang.rl_integration.examples.tasks import Mathematics

SAMPLES = [
    Sample([2, 3, 4], [5, 6], [-4.0, -4.1]),
    Sample([7], [8, 9, 10, 11], [-4.2, -4.3, -4.0, -4.4]),
    Sample([2, 2], [12], [-4.1]),
    Sample([3, 9, 9, 9, 9], [13, 14, 15], [-4.0, -4.5, -4.2]),
]


def trainer(model, *words):
    return grpo.Trainer(grpo.parser().parse_args(["--model", str(model[0]), "--device", "cpu", *words]))


def test_logprobs_are_those_of_the_response_tokens(model):
    data = objective.batch(SAMPLES)
    found = objective.policy_logprobs(model[1], data.input_ids)
    for row, sample in enumerate(SAMPLES):
        ids = torch.tensor([sample.prompt + sample.response])
        wanted = torch.log_softmax(model[1](ids).logits[0].float(), -1)
        at = torch.arange(len(sample.prompt) - 1, ids.shape[1] - 1)
        expected = wanted[at, torch.tensor(sample.response)]
        torch.testing.assert_close(found[row][data.mask[row]], expected, atol=1e-5, rtol=1e-5)
    assert data.sampled[data.mask].tolist() == pytest.approx([x for s in SAMPLES for x in s.logprobs])


def test_the_loss_clips_low_and_high_differently_and_averages_over_tokens():
    old = torch.zeros(1, 4)
    logprobs = torch.log(torch.tensor([[0.5, 0.9, 1.2, 2.0]]))
    mask = torch.tensor([[True, True, True, True]])
    up = objective.policy_loss(logprobs, old, mask, torch.tensor([[1.0]]))
    assert up.item() == pytest.approx(-(0.5 + 0.9 + 1.2 + 1.28) / 4)
    down = objective.policy_loss(logprobs, old, mask, torch.tensor([[-1.0]]))
    assert down.item() == pytest.approx((0.8 + 0.9 + 1.2 + 2.0) / 4)
    assert objective.policy_loss(logprobs, old, mask, torch.tensor([[1.0]]), tokens=8).item() == up.item() / 2
    mask[0, 3] = False
    masked = objective.policy_loss(logprobs, old, mask, torch.tensor([[1.0]]))
    assert masked.item() == pytest.approx(-(0.5 + 0.9 + 1.2) / 3)


def test_advantages_are_relative_to_the_group():
    found = objective.advantages(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    torch.testing.assert_close(found, torch.tensor([[-1.0, 1.0], [0.0, 0.0]]) / 2**0.5, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("correction", ["none", "sparse-rl"])
def test_micro_batches_add_up_to_the_batch(model, correction):
    advantage = torch.tensor([1.0, -1.0, 0.5, 0.3])
    updated = []
    for micro in ("1", "3", "64"):
        made = trainer(model, "--micro-batch", micro, "--correction", correction)
        # Adam's first step has the size of the learning rate however small a gradient is, rounding included.
        made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        measured = made.update(SAMPLES, advantage)
        updated.append((measured, [p.detach().clone() for p in made.model.parameters()]))
    before = list(model[1].parameters())
    for measured, parameters in updated[1:]:
        assert measured["grad_norm"] == pytest.approx(updated[0][0]["grad_norm"], rel=1e-4)
        assert measured["mismatch"] == pytest.approx(updated[0][0]["mismatch"], rel=1e-4)
        assert measured["kl"] == pytest.approx(updated[0][0]["kl"], rel=1e-4)
        for one, other in zip(parameters, updated[0][1], strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert any((one - other).abs().max() > 1e-4 for one, other in zip(updated[0][1], before, strict=True))


def test_mini_batches_are_steps_of_their_own(model):
    advantage = torch.tensor([1.0, -1.0, 0.5, 0.3])
    whole = trainer(model, "--learning-rate", "1e-3")
    halves = trainer(model, "--learning-rate", "1e-3", "--mini-batch", "2")
    first = whole.update(SAMPLES, advantage)
    second = halves.update(SAMPLES, advantage)
    assert whole.optimizer.state[next(whole.model.parameters())]["step"].item() == 1
    assert halves.optimizer.state[next(halves.model.parameters())]["step"].item() == 2
    # Only the first half meets the policy that sampled.
    assert second["mismatch"] != pytest.approx(first["mismatch"], rel=1e-6)


def group(prompt, texts, truncated=()):
    responses = [
        {
            "index": i,
            "token_ids": [4, 5],
            "text": text,
            "logprobs": [-1.0, -1.0],
            "finish_reason": "length" if i in truncated else "stop",
            "truncated": i in truncated,
            "rounds": 1,
            "accept_length": 2.0,
        }
        for i, text in enumerate(texts)
    ]
    fields = {"prompt_id": prompt, "prompt_index": 0, "prompt_tokens": 1, "prompt_token_ids": [3]}
    rest = {"weight_version": "step-0", "weight_updates": 0, "seed": None, "metadata": None}
    rest |= {"accept_length": 2.0, "acceptance_by_position": [0.5], "responses": responses}
    return PlacedGroup.model_validate(
        fields | rest | {"replica": "http://r", "attempts": 1, "faithful": True}
    )


def test_mathematics_rewards_right_answers_that_end(tmp_path):
    path = tmp_path / "problems.jsonl"
    rows = [
        {"id": f"q{i}", "messages": [{"role": "user", "content": "?"}], "answer": str(i)} for i in range(3)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    task = Mathematics(path)
    assert [row["id"] for row in task.prompts(0, 2)] == ["q0", "q1"]
    assert [row["id"] for row in task.prompts(1, 2)] == ["q2", "q0"]
    assert "answer" not in task.prompts(0, 1)[0]
    groups = [
        group("q1", ["Answer: 1", "Answer: 2"]),
        group("q2", [r"\boxed{2}", "Answer: 2"], truncated=[1]),
    ]
    assert task.rewards(groups) == [[1.0, 0.0], [1.0, 0.0]]
    assert Mathematics(path, even=True).rewards(groups) == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("text", ["", "{", '{"id": "a"}', "[]"])
def test_unusable_problem_files_are_refused(tmp_path, text):
    path = tmp_path / "problems.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit, match="problems"):
        Mathematics(path)
    with pytest.raises(SystemExit, match="cannot be read"):
        Mathematics(tmp_path / "absent")


def test_a_wrong_training_argument_stops_the_comparison_before_a_server_starts(tmp_path, monkeypatch, capsys):
    words = ["compare", "--model", "m", "--out", str(tmp_path / "out"), "--", "--step", "x"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stopped:
        compare.main()
    assert stopped.value.code == 2
    assert "--step" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_comparison_of_rollouts(model, tmp_path):
    """Both kinds of server, sleeping during the update; two optimizer steps a step."""
    command = [sys.executable, "-m", compare.__name__, "--model", str(model[0]), "--out", str(tmp_path)]
    # A budget below the contexts, so that drafts are sparse.
    flags = "--dtype float32 --max-total-tokens 20000 --max-running-requests 32 --s3r-min-budget 8"
    flags += " --s3r-recent-window 4"
    command += ["--server-args", flags, "--"]
    prepare("arithmetic", tmp_path / "problems.jsonl", limit=12)
    command += ["--data", str(tmp_path / "problems.jsonl"), "--reward", "even"]
    command += ["--steps", "3", "--prompts", "4", "--group-size", "4", "--mini-batch", "8", "--sleep", "all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert list(report["steps"]) == ["s3r", "autoregressive"]
    for mode, steps in report["steps"].items():
        assert [step["step"] for step in steps] == [0, 1, 2]
        for step in steps:
            assert set(step["seconds"]) == set(compare.PHASES)
            # The first mini-batch meets the weights that sampled: both engines have what the trainer sent.
            assert step["mismatch"] < 1e-3
            assert abs(step["kl"]) < 1e-4
            assert step["response_tokens"] > 0
        accepted = report["summary"][mode]["accept_length"]
        assert accepted is None if mode == "autoregressive" else accepted > 1
    summary = report["summary"]["s3r"]
    assert summary["steps"] == 2
    assert summary["step_seconds"] == pytest.approx(sum(summary["seconds"].values()))
