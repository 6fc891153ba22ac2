"""Mode direct: responses are samples of the sparse policy, and say so."""

import numpy as np
import pytest

pytestmark = pytest.mark.slow

SAMPLING = {"max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True}
SAMPLES = 3000


@pytest.fixture
def starved(current_engine, tiny_llama, gate):
    return current_engine(tiny_llama[0], s3r_mode="direct", **gate.STARVED)


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
        assert np.ptp(mine) < 1e-3, "the sparse policy is a function of the tokens"
        law[number] = np.exp(mine.mean())
    return law


@pytest.mark.parametrize("temperature", [1.0, 1.4])
def test_a_starved_budget_gives_the_sparse_law_and_not_the_dense_one(starved, tiny_llama, gate, temperature):
    responses, outputs = respond(starved, gate, temperature=temperature)
    dense = gate.enumerated_law(tiny_llama[1], gate.PROMPT, temperature=temperature)
    sparse = reported_law(responses, outputs, len(dense))
    missing = 1 - sparse.sum()
    assert -1e-3 < missing < 0.05, "what was not sampled is rare"
    assert gate.p_value(responses, sparse) > 1e-4
    counts = np.bincount(responses, minlength=len(dense))
    distance = 0.5 * np.abs(counts / SAMPLES - dense / dense.sum()).sum()
    assert distance > 0.1, "the gate of the exact mode would not see this"
    assert gate.p_value(responses, dense) < 1e-6


def test_responses_are_marked_and_report_no_acceptance(starved, gate):
    for tokens, rounds in ((1, 0), (4, 1), (7, 2)):
        meta = respond_at_length(starved, gate, tokens)["meta_info"]
        assert meta["s3r_faithful"] is False
        assert meta["s3r_rounds"] == rounds
        assert "s3r_accept_length" not in meta
        assert len(meta["output_token_logprobs"]) == tokens
    state = starved.get_server_info()["internal_states"][0]["s3r"]
    assert state["config"]["mode"] == "direct"
    assert "accept_length" not in state


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


def test_a_budget_that_covers_everything_gives_the_dense_law(current_engine, tiny_llama, gate):
    whole = current_engine(tiny_llama[0], **gate.STARVED | {"s3r_mode": "direct", "s3r_min_budget": 64})
    responses, outputs = respond(whole, gate)
    dense = gate.enumerated_law(tiny_llama[1], gate.PROMPT)
    assert gate.p_value(responses, dense) > 1e-4
    sparse = reported_law(responses, outputs, len(dense))
    seen = sparse > 0
    np.testing.assert_allclose(sparse[seen], dense[seen], rtol=1e-3)
    assert {output["meta_info"]["s3r_faithful"] for output in outputs} == {False}
