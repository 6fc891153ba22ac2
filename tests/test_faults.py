"""One sentence for a fault in an input: the place, the field that was meant, nothing of the input at length."""

import json

import pytest
from pydantic import ValidationError

from s3r_sglang.faults import nearest, sentence, unknown
from s3r_sglang.server.protocol import RolloutRequest

PROMPT = {"id": 1, "prompt": "x"}


def fault(**changes):
    with pytest.raises(ValidationError) as error:
        RolloutRequest.model_validate_json(json.dumps({"prompts": [PROMPT], "group_size": 2} | changes))
    return sentence(error.value, RolloutRequest)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"group_sise": 3}, "unknown field 'group_sise'; did you mean 'group_size'?"),
        ({"Group_Size": 3}, "unknown field 'Group_Size'; did you mean 'group_size'?"),
        ({"zz": 1}, "unknown field 'zz'; known: group_size, prompts, sampling, seed, stream."),
        ({"z\nz": 1}, r"unknown field 'z\nz'; known: group_size, prompts, sampling, seed, stream."),
        (
            {"prompts": [{**PROMPT, "max_tokens": 3}]},
            "prompts.0: unknown field 'max_tokens'; did you mean 'max_new_tokens'?",
        ),
        (
            {"prompts": [PROMPT, {"id": 2, "messages": [{"role": "user", "content": "x", "name": "n"}]}]},
            "prompts.1.messages.0: unknown field 'name'; known: content, role.",
        ),
        ({"sampling": {"top_p": "1"}}, "sampling.top_p: must be a valid number."),
        (
            {"prompts": [{"id": None, "prompt": "x"}]},
            "prompts.0.id: must be a non-empty string or an integer.",
        ),
        ({"prompts": [PROMPT, PROMPT]}, "prompts: the id 1 occurs twice."),
    ],
)
def test_a_fault_of_a_request_is_one_sentence(changes, expected):
    assert fault(**changes) == expected


def test_a_misspelt_field_comes_before_the_missing_one():
    with pytest.raises(ValidationError) as error:
        RolloutRequest.model_validate({"prompts": [PROMPT], "groupsize": 2})
    assert sentence(error.value, RolloutRequest) == "unknown field 'groupsize'; did you mean 'group_size'?"


def test_long_names_and_long_lists_are_cut():
    assert len(unknown("field", "x" * 1000, ["a"])) < 120
    assert unknown("flag", "zz", [f"name{i}" for i in range(500)]) == "unknown flag 'zz'."


def test_nearness_has_a_threshold():
    assert nearest("temprature", ["temperature", "top_p"]) == "temperature"
    assert nearest("temprature", ["top_p"]) is None
    assert nearest("temp", ["temperature"], similar=0.9) is None
