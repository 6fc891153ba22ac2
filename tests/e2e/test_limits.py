"""Extreme configurations through the real engine: long drafts, tiny and full budgets, the context limit."""

import pytest

pytestmark = pytest.mark.slow

CONTEXT = 256
PROMPTS = [[1, 2, 3], [2, 0, 1, 3, 2, 2, 1], list(range(4)) * 20]


@pytest.mark.parametrize(
    "limits",
    [
        # The reserve of a round, 66 positions, reaches far beyond the context; one position is drafted from.
        {"speculative_num_steps": 32, "s3r_min_budget": 1, "s3r_recent_window": 1, "s3r_budget_ratio": 0.01},
        {"speculative_num_steps": 1, "s3r_budget_ratio": 1.0, "s3r_prompt_queries": 1},
    ],
    ids=["k=32", "k=1"],
)
def test_requests_at_the_context_limit_equal_the_dense_model(tiny_llama, engine, is_greedy, limits):
    folder, model = tiny_llama
    with engine(
        folder,
        skip_tokenizer_init=True,
        speculative_algorithm="self-sparse",
        max_total_tokens=4000,
        max_running_requests=4,
        **limits,
    ) as llm:
        sampling = [
            {"temperature": 0.0, "max_new_tokens": CONTEXT - len(prompt), "ignore_eos": True}
            for prompt in PROMPTS
        ]
        outputs = llm.generate(input_ids=PROMPTS, sampling_params=sampling)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        # SGLang ends a response 2 tokens before the context length.
        assert len(output["output_ids"]) == CONTEXT - 2 - len(prompt)
        assert is_greedy(model, prompt, output["output_ids"])
