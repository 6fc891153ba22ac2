"""The KV pool after rounds of sparse drafting: as if the response had been prefilled densely.

The probe reads the rows that a follow-up request would take from the radix cache.
"""

import pytest
import torch

pytestmark = pytest.mark.slow

PROMPT_LENGTH = 100
DRAFT_LENGTH = 3


@pytest.fixture(scope="module")
def running(probed_environment, engine, tiny_llama):
    args = {
        "speculative_algorithm": "SELF_SPARSE",
        "speculative_num_steps": DRAFT_LENGTH,
        "s3r_min_budget": 3,
        "s3r_recent_window": 1,
        "skip_tokenizer_init": True,
        "max_total_tokens": 20_000,
        "max_running_requests": 32,
    }
    with engine(tiny_llama[0], **args) as running:
        yield running


def cached_kv(engine, token_ids, path) -> torch.Tensor:
    """[2, layers, cached tokens, Hkv, D]."""
    engine.collective_rpc("probe_kv", token_ids=token_ids, path=str(path))
    return torch.load(path)


def prefilled_kv(flush, engine, token_ids, path) -> torch.Tensor:
    flush(engine)
    output = engine.generate(
        input_ids=token_ids, sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
    )
    assert output["meta_info"]["cached_tokens"] == 0
    return cached_kv(engine, token_ids, path)


@pytest.mark.parametrize(("new_tokens", "rounds_at_least"), [(DRAFT_LENGTH, 1), (140, 50)])
def test_pool_equals_a_dense_prefill(running, flush, tmp_path, new_tokens, rounds_at_least):
    """Six requests in one batch, so that rounds of different lengths interleave. Measured: 4e-6 at most."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(4, (6, PROMPT_LENGTH), generator=generator).tolist()
    flush(running)
    outputs = running.generate(
        input_ids=prompts,
        sampling_params={"temperature": 1.0, "max_new_tokens": new_tokens, "ignore_eos": True},
    )
    assert max(output["meta_info"]["s3r_rounds"] for output in outputs) >= rounds_at_least
    assert min(output["meta_info"]["spec_accept_rate"] for output in outputs) < 1
    # The last token of a response was sampled and never fed: it has no KV.
    sequences = [prompt + output["output_ids"][:-1] for prompt, output in zip(prompts, outputs, strict=True)]
    after_rounds = [cached_kv(running, tokens, tmp_path / "kv") for tokens in sequences]
    for tokens, kv in zip(sequences, after_rounds, strict=True):
        assert kv.shape[2] == len(tokens), "the whole response is in the radix cache"
        dense = prefilled_kv(flush, running, tokens, tmp_path / "kv")
        torch.testing.assert_close(kv, dense, rtol=2e-5, atol=2e-5)


def test_probe_tells_sparse_kv_from_dense(running, flush, tmp_path):
    """With the provisional KV of the drafts left in the pool, the comparison above fails."""
    prompt = torch.randint(4, (PROMPT_LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    flush(running)
    running.collective_rpc("plant", bug="provisional_kv_kept")
    try:
        output = running.generate(
            input_ids=prompt,
            sampling_params={"temperature": 1.0, "max_new_tokens": 60, "ignore_eos": True},
        )
    finally:
        running.collective_rpc("plant", bug=None)
    tokens = prompt + output["output_ids"][:-1]
    kv = cached_kv(running, tokens, tmp_path / "kv")
    dense = prefilled_kv(flush, running, tokens, tmp_path / "kv")
    torch.testing.assert_close(kv[:, :, :PROMPT_LENGTH], dense[:, :, :PROMPT_LENGTH], rtol=2e-5, atol=2e-5)
    assert (kv - dense)[:, :, PROMPT_LENGTH:].abs().max() > 0.01
