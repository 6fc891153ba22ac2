"""Flags and keyword arguments, their way into other processes, and what stops the start."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
import torch

from s3r_sglang import cpu
from s3r_sglang.config import ConfigError, S3RConfig, config_of, flag_fields, flag_of

pytestmark = pytest.mark.usefixtures("plugin")

SETTINGS = {"s3r_budget_ratio": 0.1, "s3r_min_budget": 100, "s3r_recent_window": 16, "s3r_seed": 3}
EXPECTED = S3RConfig(budget_ratio=0.1, min_budget=100, recent_window=16, seed=3)


def command_line(model, *flags):
    from sglang.srt.server_args import prepare_server_args

    argv = ["--model-path", model]
    if not torch.cuda.is_available():
        for name, value in cpu.SERVER_ARGS.items():
            argv += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return prepare_server_args([*argv, *map(str, flags)])


@pytest.mark.parametrize("name", ["self-sparse", "SELF_SPARSE"])
def test_flags_reach_the_configuration(model, name):
    flags = [part for field, value in SETTINGS.items() for part in ("--" + field.replace("_", "-"), value)]
    args = command_line(model, "--speculative-algorithm", name, *flags)
    assert config_of(args) == EXPECTED
    assert args.speculative_algorithm == "SELF_SPARSE"
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens, args.speculative_eagle_topk) == (
        6,
        7,
        1,
    )


def test_every_field_has_a_flag(model):
    args = command_line(model, "--speculative-algorithm", "self-sparse", "--s3r-prompt-queries", 8)
    assert config_of(args).prompt_queries == 8
    assert {flag_of(name) for name in flag_fields()} >= {"--s3r-budget-ratio", "--s3r-seed"}
    assert {field.name for field in dataclasses.fields(args)} >= set(flag_fields().values())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--s3r-bugdet-ratio", 0.1],
            "unknown flag '--s3r-bugdet-ratio'; did you mean '--s3r-budget-ratio'?",
        ),
        (
            ["--mem-fracton-static=0.1"],
            "unknown flag '--mem-fracton-static'; did you mean '--mem-fraction-static'?",
        ),
        (["--s3r-draft-length", 3], "the draft length is SGLang's --speculative-num-steps."),
        (["--s3r-budget-ratio", "x"], "argument --s3r-budget-ratio: invalid float value: 'x'."),
        (
            ["--s3r-mode", "sloppy"],
            "argument --s3r-mode: invalid choice: 'sloppy' (choose from 'exact', 'direct').",
        ),
        (["stray"], "'stray' belongs to no flag."),
        (["--model-path", "/no/such/folder"], "the model folder /no/such/folder does not exist."),
    ],
)
def test_a_wrong_command_line_ends_with_one_sentence(model, capsys, flags, sentence):
    with pytest.raises(SystemExit) as end:
        command_line(model, "--speculative-algorithm", "self-sparse", *flags)
    assert str(end.value).startswith("error: ")
    assert str(end.value).endswith(sentence)
    assert capsys.readouterr().err == ""


def test_a_command_line_without_s3r_is_left_to_sglang(model, capsys):
    with pytest.raises(SystemExit) as end:
        command_line(model, "--mem-fracton-static", 0.1)
    assert end.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_the_draft_length_is_named_by_its_keyword(make_args):
    with pytest.raises(ConfigError, match="draft length is SGLang's --speculative-num-steps"):
        make_args(s3r_draft_length=3)


def test_engine_keywords_reach_the_configuration(make_args):
    assert config_of(make_args(**SETTINGS)) == EXPECTED


def test_num_steps_is_the_draft_length(make_args, tmp_path):
    (tmp_path / "s3r.yaml").write_text("draft_length: 5\nmin_budget: 70\n")
    args = make_args(speculative_num_steps=3, s3r_config=str(tmp_path / "s3r.yaml"))
    assert (config_of(args).draft_length, config_of(args).min_budget) == (3, 70)
    assert args.speculative_num_draft_tokens == 4


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, dataclasses.replace, lambda args: pickle.loads(pickle.dumps(args))],
    ids=["copy", "deepcopy", "replace", "pickle"],
)
def test_configuration_survives_duplication(make_args, duplicate):
    assert config_of(duplicate(make_args(**SETTINGS))) == EXPECTED


def test_rebuilding_from_asdict_keeps_the_configuration(make_args, tmp_path):
    """The file may be gone by then: resolved values, not sources, are what travels."""
    path = tmp_path / "s3r.yaml"
    path.write_text("budget_ratio: 0.3\n")
    fields = dataclasses.asdict(make_args(s3r_config=str(path)))
    assert fields["s3r_budget_ratio"] == 0.3
    path.write_text("budget_ratio: 0.4\n")
    assert config_of(make_args(**{name: fields[name] for name in flag_fields().values()})).budget_ratio == 0.3


def test_draft_copy_of_the_scheduler_keeps_the_configuration(make_args):
    from sglang.srt.runtime_context import get_context, publish
    from sglang.srt.speculative.draft_worker_common import draft_server_args_copy

    args = make_args(**SETTINGS)
    with get_context().preserve_config():
        publish(args, role="scheduler")
        assert config_of(draft_server_args_copy(args, args.get_model_config())) == EXPECTED
        assert get_context().resolved_server_args_dict()["s3r_min_budget"] == 100


@pytest.mark.slow
def test_configuration_survives_the_way_to_a_process_without_plugins(make_args, tmp_path):
    """SGLang's data-parallel controller does not load plugins, but passes the arguments on."""
    (tmp_path / "args.pkl").write_bytes(pickle.dumps(make_args(**SETTINGS)))
    code = (
        "import pickle, sys; args = pickle.load(open(sys.argv[1], 'rb'));"
        "args = pickle.loads(pickle.dumps(args));"
        "from s3r_sglang.config import config_of; print(config_of(args).model_dump_json())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "args.pkl")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert S3RConfig.model_validate_json(printed.splitlines()[-1]) == EXPECTED


def test_unknown_keyword_names_the_nearest(make_args):
    with pytest.raises(ConfigError, match="'s3r_budget_rato'; did you mean 's3r_budget_ratio'"):
        make_args(s3r_budget_rato=0.1)


def test_command_line_ends_with_the_sentence(model):
    with pytest.raises(SystemExit, match=r"^error: S3R setting budget_ratio must be less than or equal to 1"):
        command_line(model, "--speculative-algorithm", "self-sparse", "--s3r-budget-ratio", 2)


def test_settings_without_the_algorithm_are_refused(make_args):
    with pytest.raises(ConfigError, match="--s3r-min-budget needs --speculative-algorithm self-sparse"):
        make_args(speculative_algorithm=None, s3r_min_budget=100)


def test_other_servers_are_left_alone(make_args):
    args = make_args(speculative_algorithm=None)
    assert args.speculative_num_steps is None
    assert args.s3r_min_budget is None
    with pytest.raises(ConfigError, match="without --speculative-algorithm self-sparse"):
        config_of(args)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk must be 1"),
        ({"speculative_num_draft_tokens": 6}, "--speculative-num-draft-tokens must be 7"),
        ({"speculative_num_steps": 0}, "draft_length must be greater"),
        ({"page_size": 16}, "needs --page-size 1, not 16"),
        ({"enable_mixed_chunk": True}, "drop --enable-mixed-chunk"),
        ({"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"]}, "serve merged weights"),
        ({"enable_hierarchical_cache": True}, "drop --enable-hierarchical-cache"),
        ({"enable_two_batch_overlap": True}, "drop --enable-two-batch-overlap"),
        ({"speculative_use_rejection_sampling": True}, "drop --speculative-use-rejection-sampling"),
        ({"speculative_accept_threshold_acc": 0.9}, "needs --speculative-accept-threshold-acc 1.0, not 0.9"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "set --kv-cache-dtype auto, not fp8_e5m2"),
        ({"tokenizer_worker_num": 2}, "needs --tokenizer-worker-num 1, not 2"),
        ({"enable_return_hidden_states": True}, "drop --enable-return-hidden-states"),
        ({"enable_custom_logit_processor": True}, "drop --enable-custom-logit-processor"),
        ({"pp_size": 2}, "needs --pp-size 1, not 2"),
        ({"attn_cp_size": 2, "tp_size": 2}, "needs --attn-cp-size 1, not 2"),
        ({"disaggregation_mode": "prefill"}, "needs --disaggregation-mode null, not prefill"),
        ({"enable_dp_attention": True, "tp_size": 2, "dp_size": 2}, "drop --enable-dp-attention"),
        ({"speculative_adaptive": True}, "drop --speculative-adaptive"),
        ({"is_embedding": True}, "drop --is-embedding"),
        ({"enable_return_routed_experts": True}, "drop --enable-return-routed-experts"),
        ({"enable_return_indexer_topk": True}, "drop --enable-return-indexer-topk"),
        ({"enable_strict_thinking": True}, "drop --enable-strict-thinking"),
        ({"enable_multi_layer_eagle": True}, "drop --enable-multi-layer-eagle"),
        ({"enable_flexkv": True}, "drop --enable-flexkv"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_modes_stop_the_start(make_args, kwargs, sentence):
    with pytest.raises(ConfigError, match=sentence) as fault:
        make_args(**kwargs)
    assert str(fault.value).count("\n") == 0


def test_a_draft_model_stops_the_start(make_args, model):
    with pytest.raises(ConfigError, match="the model drafts for itself"):
        make_args(speculative_draft_model_path=model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="names the CPU's backend")
def test_unsupported_attention_backend_stops_the_start(make_args):
    with pytest.raises(ConfigError, match="needs --attention-backend torch_native on cpu, not triton"):
        make_args(attention_backend="triton")


def test_rust_server_stops_the_start(make_args, monkeypatch):
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(ConfigError, match="unset it"):
        make_args()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64},
            "sliding-window",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": 1,
            },
            "sliding-window",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 16},
            "sliding-window|capping",
        ),
        (
            {
                "architectures": ["DeepseekV2ForCausalLM"],
                "model_type": "deepseek_v2",
                "kv_lora_rank": 16,
                "q_lora_rank": None,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
            },
            "latent attention",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no token generation"),
        ({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "head_dim": 16}, "hybrid"),
        ({"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}, "recurrent"),
        (
            {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "full_attn_idxs": [0]},
            "recurrent",
        ),
        ({"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}, "an encoder"),
        (
            {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"},
            "image, audio or video",
        ),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_unsupported_models_stop_the_start(make_args, write_config, changes, kind):
    folder = write_config(**changes)
    with pytest.raises(ConfigError, match=f"does not support models with .*({kind})"):
        make_args(model_path=folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        # Qwen2 and Qwen3 configs carry a sliding window even where it is not used.
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": False,
            "sliding_window": 64,
        },
    ],
    ids=lambda value: value["architectures"][0],
)
def test_full_attention_models_start(make_args, write_config, changes):
    assert config_of(make_args(model_path=write_config(**changes))) == S3RConfig()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's rule")
def test_overlap_is_off_on_a_cpu(make_args):
    assert make_args(disable_overlap_schedule=False).disable_overlap_schedule is True


def test_concurrency_defaults_to_the_papers(make_args):
    assert make_args().max_running_requests == 256
    assert make_args(max_running_requests=8).max_running_requests == 8


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ({"logit_cap": 30.0}, "soft-capping"),
        ({"sliding_window_size": 128}, "sliding-window"),
        ({"is_cross_attention": True}, "cross-attention"),
        ({"v_head_dim": 8}, "different widths"),
    ],
)
def test_a_loaded_layer_that_does_not_attend_in_full_stops_the_start(plugin, option, kind):
    """Grok, for one, caps attention logits by a default that its config.json need not name."""
    from sglang.srt.layers.radix_attention import RadixAttention

    from s3r_sglang.support import refuse_unsupported_layers

    plain = RadixAttention(4, 16, 0.25, 2, layer_id=0)
    refuse_unsupported_layers(torch.nn.ModuleList([plain]))
    other = RadixAttention(4, 16, 0.25, 2, layer_id=1, **option)
    with pytest.raises(ConfigError, match=f"{kind}.*, which layer 1 of ModuleList uses"):
        refuse_unsupported_layers(torch.nn.ModuleList([plain, other]))
