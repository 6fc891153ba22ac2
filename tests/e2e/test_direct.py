"""Mode direct: responses are samples of the sparse policy, and say so."""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.slow

SAMPLING = {"max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True}
SAMPLES = 3000
# Of the logarithm of a response's probability: float32, and half precision on a GPU.
ROUNDING = 0.03 if torch.cuda.is_available() else 1e-3


@pytest.fixture(scope="module")
def starved(engine, tiny_llama, gate):
    """Draft steps read 3 positions and the ones since; two drafts a round, so that 4 tokens take two rounds."""
    args = gate.STARVED | {"s3r_mode": "direct", "speculative_num_steps": 2}
    with engine(tiny_llama[0], **args) as running:
        yield running


def respond(engine, gate, count=SAMPLES, prompt=None, **sampling):
    """Response numbers in lexicographic order, and the outputs."""
    outputs = engine.generate(
        input_ids=[prompt or gate.PROMPT] * count, sampling_params=SAMPLING | sampling, return_logprob=True
    )
    tokens = np.array([output["output_ids"] for output in outputs])
    return tokens @ gate.VOCAB ** np.arange(gate.LENGTH)[::-1], outputs


def reported_law(responses, outputs, size):
    """Probability of each response by its own logprobs, after a check that equal responses report the same."""
    totals = np.array(
        [sum(value for value, *_ in output["meta_info"]["output_token_logprobs"]) for output in outputs]
    )
    law = np.zeros(size)
    for number in np.unique(responses):
        mine = totals[responses == number]
        assert np.ptp(mine) < ROUNDING, "the sparse policy is a function of the tokens"
        law[number] = np.exp(mine.mean())
    return law


@pytest.mark.parametrize("temperature", [1.0, 1.4])
def test_a_starved_budget_gives_the_sparse_law_and_not_the_dense_one(starved, tiny_llama, gate, temperature):
    responses, outputs = respond(starved, gate, temperature=temperature)
    dense = gate.enumerated_law(tiny_llama[1], gate.PROMPT, temperature=temperature)
    sparse = reported_law(responses, outputs, len(dense))
    missing = 1 - sparse.sum()
    assert -ROUNDING < missing < 0.05, "what was not sampled is rare"
    assert gate.p_value(responses, sparse) > 1e-4
    counts = np.bincount(responses, minlength=len(dense))
    distance = 0.5 * np.abs(counts / SAMPLES - dense / dense.sum()).sum()
    assert distance > 0.1, "the gate of the exact mode would not see this"
    assert gate.p_value(responses, dense) < 1e-6


def test_responses_are_marked_and_report_no_acceptance(starved, gate):
    for tokens, rounds in ((1, 0), (4, 2), (7, 3)):
        meta = respond_at_length(starved, gate, tokens)["meta_info"]
        assert meta["s3r_faithful"] is False
        assert meta["s3r_rounds"] == rounds
        assert not [name for name in meta if "accept" in name or name.startswith("spec_")]
        assert len(meta["output_token_logprobs"]) == tokens
    state = starved.get_server_info()["internal_states"][0]["s3r"]
    assert state["config"]["mode"] == "direct"
    assert "accept_length" not in state


def test_a_group_of_the_rollout_service_is_marked(starved, gate):
    from s3r_sglang.server.groups import Plan, sample
    from s3r_sglang.server.protocol import Prompt

    prompt = Prompt(id="a", token_ids=gate.PROMPT, metadata={"answer": 1})
    sampling = {**SAMPLING, "max_new_tokens": 9, "n": 3, "sampling_seed": 5}
    plan = Plan(0, prompt, gate.PROMPT, 3, sampling)
    group = starved.loop.run_until_complete(sample(starved.tokenizer_manager, plan, "r1", 0, draft_length=2))
    assert group.faithful is False
    assert (group.accept_length, group.acceptance_by_position) == (None, [0.0] * 2)
    assert (group.prompt_token_ids, group.metadata) == (gate.PROMPT, {"answer": 1})
    # One token from the prefill, then two a round.
    assert [response.rounds for response in group.responses] == [4] * 3
    assert {response.accept_length for response in group.responses} == {None}
    assert [len(response.logprobs) for response in group.responses] == [9] * 3


def respond_at_length(engine, gate, tokens):
    sampling = SAMPLING | {"max_new_tokens": tokens}
    output = engine.generate(
        input_ids=gate.PROMPT, sampling_params=sampling, return_logprob=True, top_logprobs_num=gate.VOCAB
    )
    meta = output["meta_info"]
    for (value, token, _), best in zip(
        meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
    ):
        distribution = {other: logprob for logprob, other, _ in best}
        assert sum(np.exp(list(distribution.values()))) == pytest.approx(1, abs=1e-4)
        assert distribution[token] == value
    return output


def test_a_seed_reproduces(starved, gate):
    first, _ = respond(starved, gate, count=8, sampling_seed=5)
    second, _ = respond(starved, gate, count=3, sampling_seed=5)
    assert len(set(first)) == 1
    assert set(second) == set(first)


def test_a_budget_that_covers_everything_gives_the_dense_law(starved, tiny_llama, gate):
    """After two prompt tokens, the second and last round starts from three positions: all of them are read."""
    prompt = gate.PROMPT[:2]
    responses, outputs = respond(starved, gate, prompt=prompt)
    dense = gate.enumerated_law(tiny_llama[1], prompt)
    assert gate.p_value(responses, dense) > 1e-4
    sparse = reported_law(responses, outputs, len(dense))
    seen = sparse > 0
    np.testing.assert_allclose(sparse[seen], dense[seen], rtol=ROUNDING)
    assert {output["meta_info"]["s3r_faithful"] for output in outputs} == {False}
