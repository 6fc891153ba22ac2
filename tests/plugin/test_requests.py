"""What a request may ask for, checked on SGLang's own tokenized request."""

import pytest

from s3r_sglang.requests import refuse_fatal, refuse_inexact, refuse_unknown, seed_of_sample


@pytest.fixture
def request_of(plugin):
    """Factory of tokenized requests with the given sampling parameters and options."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    def make(params=None, **options):
        params = SamplingParams(**(params or {}))
        params.normalize(tokenizer=None)
        fields = {
            "input_text": "",
            "input_ids": None,
            "input_embeds": None,
            "mm_inputs": None,
            "token_type_ids": None,
            "sampling_params": params,
            "return_logprob": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "token_ids_logprob": None,
            "stream": False,
        }
        return TokenizedGenerateReqInput(**{**fields, **options})

    return make


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({"temperature": 0.0}, {}),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05}, {}),
        ({"frequency_penalty": 0.0, "presence_penalty": None, "repetition_penalty": 1.0}, {}),
        ({"logit_bias": {"3": -5.0}, "stop_token_ids": [2], "ignore_eos": True, "n": 4}, {}),
        ({"sampling_seed": 7, "regex": "", "custom_params": {"label": "a"}}, {}),
        ({}, {"return_logprob": True, "top_logprobs_num": 5, "token_ids_logprob": [1, 2], "stream": True}),
    ],
)
def test_exact_features_pass(request_of, params, options):
    refuse_inexact(request_of(params, **options))


def test_unknown_sampling_parameters_are_named():
    refuse_unknown({"temperature": 1.0, "sampling_seed": 3, "logit_bias": {"1": 2.0}})
    with pytest.raises(
        ValueError, match="sampling_params: unknown field 'temprature'; did you mean 'temperature'"
    ):
        refuse_unknown({"top_p": 1.0, "temprature": 1.0})


def test_a_grammar_is_named_as_the_openai_api_names_it(request_of):
    with pytest.raises(
        ValueError, match=r"json_schema='\{\}' \(response_format in the OpenAI API\): leave it out"
    ):
        refuse_inexact(request_of({"json_schema": "{}"}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("json_schema", "{}"),
        ("regex", "a+"),
        ("ebnf", "root ::= 'a'"),
        ("structural_tag", "{}"),
    ],
)
def test_inexact_parameters_are_refused(request_of, name, value):
    with pytest.raises(ValueError, match=f"does not support {name}="):
        refuse_inexact(request_of({name: value}))


def test_min_new_tokens_is_refused(request_of):
    request = request_of()
    request.sampling_params.min_new_tokens = 3
    with pytest.raises(ValueError, match="does not support min_new_tokens=3"):
        refuse_inexact(request)


def test_thinking_budget_is_refused(request_of):
    with pytest.raises(ValueError, match="max_thinking_tokens"):
        refuse_inexact(request_of({"custom_params": {"thinking_budget": 10}}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("custom_logit_processor", "{}"),
        ("return_hidden_states", True),
        ("return_sampling_mask", True),
        ("return_routed_experts", True),
        ("lora_id", "adapter"),
        ("input_embeds", [[0.0]]),
        ("multi_item_delimiter_indices", [1]),
    ],
)
def test_inexact_options_are_refused(request_of, name, value):
    with pytest.raises(ValueError, match=f"does not support {name}"):
        refuse_inexact(request_of(**{name: value}))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"sampling_seed": "7"}, "sampling_seed must be an integer, not '7'"),
        ({"sampling_seed": 1.5}, "sampling_seed must be an integer"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"max_new_tokens": 9.5}, "max_new_tokens must be an integer"),
        ({"logit_bias": {"3": float("nan")}}, "logit_bias of token 3 must be a number"),
        ({"logit_bias": {"3": float("inf")}}, "logit_bias of token 3 must be a number"),
    ],
)
def test_parameters_that_end_the_scheduler_are_refused(request_of, params, message):
    with pytest.raises(ValueError, match=message):
        refuse_fatal(request_of(params, input_ids=[0]), vocab_size=64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": [1, 64]}, "token id 64 is outside the model's vocabulary of 64"),
        ({"input_ids": [-1, 3]}, "token id -1 is outside"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len must be"),
        ({"return_logprob": True, "top_logprobs_num": 65}, "top_logprobs_num 65 exceeds"),
        ({"return_logprob": True, "top_logprobs_num": 1.5}, "top_logprobs_num must be an integer"),
    ],
)
def test_what_ends_the_scheduler_is_refused(request_of, options, message):
    with pytest.raises(ValueError, match=message):
        refuse_fatal(request_of(**{"input_ids": [0, 63], **options}), vocab_size=64)


def test_the_limits_of_a_request_pass(request_of):
    options = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 64}
    params = {"sampling_seed": 2**70, "logit_bias": {"3": -float("inf")}}
    refuse_fatal(request_of(params, input_ids=[0, 63], **options), vocab_size=64)


def test_samples_of_a_group_get_distinct_valid_seeds():
    seeds = [seed_of_sample(7, sample) for sample in range(64)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [seed_of_sample(7, sample) for sample in range(64)]
    assert seed_of_sample(8, 1) not in seeds
