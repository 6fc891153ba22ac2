"""SmolLM2-135M on real text through SGLang's engine: the greedy chain, log-probabilities and accept lengths.

Float32, so that a difference is an error and not a rounding. The order of the tests saves starts of engines.
"""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.slow

COMMON = {
    "dtype": "float32",
    "chunked_prefill_size": 512,
    "max_total_tokens": 24_000,
    "max_running_requests": 32,
    "random_seed": 1,
    "skip_tokenizer_init": True,
}
S3R = {**COMMON, "speculative_algorithm": "SELF_SPARSE"}
DRAFT_LENGTH = 6

# Both sides of the minimum budget (192) and of the prefill chunk (512), up to four chunks. A prompt of the
# second wave starts with one of the first, so that it hits the radix cache.
FIRST_WAVE = [32, 33, 64, 191, 192, 193]
SECOND_WAVE = [300, 511, 512, 513, 1025, 1600]
DOCUMENTS = 5


def prompt_of(text_ids, document: int, length: int) -> list[int]:
    start = document * len(text_ids) // DOCUMENTS
    return text_ids[start : start + length]


def greedy_responses(engine, text_ids):
    params = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
    outputs = []
    for wave in (FIRST_WAVE, SECOND_WAVE):
        prompts = [prompt_of(text_ids, i % DOCUMENTS, length) for i, length in enumerate(wave)]
        outputs += engine.generate(input_ids=prompts, sampling_params=params)
    return outputs


@pytest.fixture
def default(current_engine, smollm2):
    """The engine with the default budget."""
    return current_engine(smollm2, **S3R)


def test_greedy_equals_the_engine_without_speculation(current_engine, smollm2, text_ids):
    plain = greedy_responses(current_engine(smollm2, **COMMON), text_ids)
    outputs = greedy_responses(current_engine(smollm2, **S3R), text_ids)
    for expected, output in zip((output["output_ids"] for output in plain), outputs, strict=True):
        assert len(expected) == 32
        assert output["output_ids"] == expected
    cached = [output["meta_info"]["cached_tokens"] for output in outputs[len(FIRST_WAVE) :]]
    assert all(tokens >= 32 for tokens in cached), "the second wave was to continue from the radix cache"
    rejected = [output for output in outputs if output["meta_info"]["spec_accept_rate"] < 1]
    assert rejected, "no draft was ever rejected: this test would see little"


def test_logprobs_equal_those_of_a_dense_prefill(default, flush, smollm2, text_ids):
    """Measured: 2e-5 at most. Temperature 0.7 against transformers, 1.0 against a prefill by the engine."""
    prompt = prompt_of(text_ids, 3, 700)
    cold, plain = default.generate(
        input_ids=[prompt, prompt],
        sampling_params=[
            {"temperature": t, "max_new_tokens": 100, "ignore_eos": True, "sampling_seed": 5}
            for t in (0.7, 1.0)
        ],
        return_logprob=True,
    )
    for output in (cold, plain):
        assert [token for _, token, _ in output["meta_info"]["output_token_logprobs"]] == output["output_ids"]
        assert len(output["output_ids"]) == 100
    expected = transformers_logprobs(smollm2, prompt, cold["output_ids"], temperature=0.7)
    np.testing.assert_allclose(reported(cold), expected, atol=1e-4)
    np.testing.assert_allclose(
        reported(plain), prefill_logprobs(flush, default, prompt, plain["output_ids"]), atol=1e-4
    )


def reported(output) -> list[float]:
    return [logprob for logprob, *_ in output["meta_info"]["output_token_logprobs"]]


def prefill_logprobs(flush, engine, prompt, response) -> list[float]:
    flush(engine)
    output = engine.generate(
        input_ids=prompt + response,
        sampling_params={"temperature": 1.0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
    )
    assert output["meta_info"]["cached_tokens"] == 0
    return [logprob for logprob, *_ in output["meta_info"]["input_token_logprobs"]][1:]


def transformers_logprobs(folder, prompt, response, temperature) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(response)[:, None]).squeeze(1).numpy()


def accept_length(engine, text_ids, *lengths: int) -> float:
    """τ at temperature 1 over two responses of 64 tokens to a prompt of each length."""
    outputs = engine.generate(
        input_ids=[prompt_of(text_ids, i, length) for i, length in enumerate(lengths)],
        sampling_params={
            "temperature": 1.0,
            "max_new_tokens": 64,
            "ignore_eos": True,
            "n": 2,
            "sampling_seed": 3,
        },
    )
    assert len(outputs) == 2 * len(lengths)
    metas = [output["meta_info"] for output in outputs]
    rounds = sum(meta["s3r_rounds"] for meta in metas)
    return sum(meta["s3r_rounds"] * meta["s3r_accept_length"] for meta in metas) / rounds


@pytest.fixture(scope="module")
def default_accept_length(current_engine, smollm2, text_ids):
    return accept_length(current_engine(smollm2, **S3R), text_ids, 2048)


def test_accept_length_on_long_prompts(default, text_ids, default_accept_length):
    """The draft reads 192 positions and still gets 4 tokens a round."""
    assert min(default_accept_length, accept_length(default, text_ids, 3072)) >= 4.0


def test_accept_length_grows_with_the_budget(current_engine, smollm2, text_ids, default_accept_length):
    larger = current_engine(smollm2, **S3R, s3r_budget_ratio=0.2)
    assert accept_length(larger, text_ids, 2048) > default_accept_length


def test_whole_budget_is_rejected_for_rounding_only(current_engine, smollm2, text_ids):
    whole = current_engine(smollm2, **S3R, s3r_budget_ratio=1.0)
    assert accept_length(whole, text_ids, 1024) >= 1 + 0.99 * DRAFT_LENGTH
