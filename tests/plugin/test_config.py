"""The configuration itself: rules, sources and messages. Needs no SGLang."""

import pytest
from pydantic import ValidationError

from s3r_sglang.config import (
    CONFIG_ENV,
    ConfigError,
    S3RConfig,
    build,
    config_path,
    is_self_sparse,
    load_yaml,
    resolve,
)

SHIPPED = ("default", "qwen3-1.7b", "qwen3-8b", "smollm2-cpu")


@pytest.fixture(autouse=True)
def _no_config_in_environment(monkeypatch):
    monkeypatch.delenv(CONFIG_ENV, raising=False)


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        (tmp_path / "s3r.yaml").write_text(text)
        return str(tmp_path / "s3r.yaml")

    return write


def test_defaults_are_the_papers_setting():
    config = S3RConfig()
    assert (config.draft_length, config.budget_ratio, config.min_budget) == (6, 0.05, 192)


@pytest.mark.parametrize(
    ("context", "budget"), [(1, 1), (191, 191), (192, 192), (3840, 192), (3841, 193), (8192, 410)]
)
def test_budget_is_clamped_between_minimum_and_context(context, budget):
    assert S3RConfig().budget(context) == budget


def test_budget_of_everything_is_the_context():
    assert S3RConfig(budget_ratio=1).budget(5000) == 5000


def test_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        S3RConfig().draft_length = 3


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"draft_length": 0}, "draft_length must be greater than or equal to 1, not 0; .*num-steps"),
        ({"draft_length": 33}, "draft_length must be less than or equal to 32, not 33"),
        ({"budget_ratio": 0}, "budget_ratio must be greater than 0, not 0; .*--s3r-budget-ratio"),
        ({"budget_ratio": 1.01}, "budget_ratio must be less than or equal to 1, not 1.01"),
        ({"budget_ratio": float("nan")}, "budget_ratio must be"),
        ({"min_budget": 0}, "min_budget must be greater than or equal to 1, not 0"),
        ({"min_budget": 2**31}, "min_budget must be less than 2147483648"),
        ({"prompt_queries": 0}, "prompt_queries must be greater"),
        ({"prompt_queries": 257}, "prompt_queries must be less"),
        ({"seed": -1}, "seed must be greater"),
        (
            {"recent_window": 193},
            "recent_window 193 does not fit into min_budget 192: lower --s3r-recent-window",
        ),
        ({"kv_policy": "offlaod"}, "kv_policy must be 'recompute', 'offload' or 'aimd', not 'offlaod'"),
        ({"kv_limit": 3}, "kv_limit is for kv_policy offload, not aimd: drop --s3r-kv-limit"),
        ({"kv_host_gb": -1}, "kv_host_gb must be greater than or equal to 0, not -1; .*--s3r-kv-host-gb"),
        ({"kv_host_gb": float("inf")}, "kv_host_gb must be less than or equal to 1048576, not inf"),
        ({"aimd_decrease": 1}, "aimd_decrease must be less than 1, not 1; .*--s3r-aimd-decrease"),
        ({"aimd_minimum": 9, "aimd_maximum": 8}, "aimd_minimum 9 exceeds aimd_maximum 8"),
        ({"aimd_low_utilization": 0.96}, "aimd_low_utilization 0.96 exceeds aimd_high_utilization 0.95"),
        ({"recent_windw": 1}, "'recent_windw'; did you mean 'recent_window'"),
        ({"min_budget": "many"}, "min_budget must be a valid integer"),
    ],
)
def test_impossible_values_name_the_remedy(values, sentence):
    with pytest.raises(ConfigError, match=sentence) as fault:
        build(values)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("bounds", "slots", "rule"),
    [
        ({}, 256, (160, 256)),
        ({}, 300, (188, 300)),
        ({}, 1, (1, 1)),
        ({"aimd_maximum": 100}, 256, (63, 100)),
        ({"aimd_minimum": 8}, 32, (8, 32)),
    ],
)
def test_bounds_of_concurrency_follow_the_slots(bounds, slots, rule):
    aimd = S3RConfig(**bounds, aimd_increase=7).aimd(slots)
    assert (aimd.minimum, aimd.maximum, aimd.increase, aimd.decrease) == (*rule, 7, 0.7)


def test_a_bound_that_the_slots_cannot_reach_is_refused():
    with pytest.raises(ConfigError, match="--s3r-aimd-maximum 300 exceeds the 256 requests that the engine"):
        S3RConfig(aimd_maximum=300).aimd(256)


def test_later_sources_win(yaml_file, monkeypatch):
    monkeypatch.setenv(CONFIG_ENV, yaml_file("min_budget: 100\nbudget_ratio: 0.2\ndraft_length: 4\n"))
    from_file = resolve({})
    assert (from_file.min_budget, from_file.budget_ratio, from_file.draft_length) == (100, 0.2, 4)
    assert from_file.recent_window == S3RConfig().recent_window
    flags = resolve({"s3r_min_budget": 80, "s3r_budget_ratio": None, "speculative_num_steps": 3})
    assert (flags.min_budget, flags.budget_ratio, flags.draft_length) == (80, 0.2, 3)


def test_config_flag_replaces_the_environments_file(yaml_file, monkeypatch):
    monkeypatch.setenv(CONFIG_ENV, "/nowhere.yaml")
    assert resolve({"s3r_config": yaml_file("seed: 7")}).seed == 7


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("budget: 0.1", "unknown setting 'budget'; did you mean 'min_budget'|'budget_ratio'"),
        ("- 1", "must hold a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_bad_files_are_named(yaml_file, text, sentence):
    path = yaml_file(text)
    with pytest.raises(ConfigError, match=sentence) as fault:
        load_yaml(path)
    assert path in str(fault.value)


@pytest.mark.parametrize(
    ("text", "arguments", "advice"),
    [
        (
            "budget_ratio: 2",
            {},
            "budget_ratio must be less than or equal to 1, not 2; change budget_ratio in {path}.",
        ),
        ("draft_length: six", {}, "change draft_length in {path}."),
        ("seed: 3", {"s3r_budget_ratio": 0}, "change --s3r-budget-ratio."),
        ("budget_ratio: 2", {"s3r_budget_ratio": 3}, "not 3; change --s3r-budget-ratio."),
        ("min_budget: 16", {}, "lower --s3r-recent-window or raise min_budget in {path}."),
        (
            "recent_window: 99",
            {"s3r_min_budget": 8},
            "lower recent_window in {path} or raise --s3r-min-budget.",
        ),
    ],
)
def test_a_fault_names_the_place_that_the_setting_came_from(yaml_file, text, arguments, advice):
    path = yaml_file(text)
    with pytest.raises(ConfigError) as error:
        resolve({"s3r_config": path, **arguments})
    assert str(error.value).endswith(advice.format(path=path))


def test_missing_file_lists_the_shipped_ones():
    with pytest.raises(ConfigError, match="neither a file nor one of default, qwen3"):
        config_path("qwen4")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_parse(name):
    assert set(load_yaml(name)) <= set(S3RConfig.model_fields)
    assert isinstance(build(load_yaml(name)), S3RConfig)


def test_all_shipped_configs_are_tested():
    assert {path.stem for path in config_path("default").parent.glob("*.yaml")} == set(SHIPPED)


@pytest.mark.parametrize(
    ("name", "ours"), [("self-sparse", True), ("SELF_SPARSE", True), ("EAGLE", False), (None, False)]
)
def test_both_spellings_select_the_algorithm(name, ours):
    assert is_self_sparse(name) is ours
