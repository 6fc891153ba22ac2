"""Model folders without weights: server arguments are resolved from `config.json` alone."""

import json

import pytest
import torch

from s3r_sglang import cpu

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture
def write_config(tmp_path):
    """Factory of model folders: a small Llama's `config.json` with the given changes."""

    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
        return str(tmp_path)

    return write


@pytest.fixture
def model(write_config):
    return write_config()


@pytest.fixture(scope="session")
def plugin():
    """SGLang with its plugins loaded, ours by its entry point, as the launcher does it."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from s3r_sglang import plugin

    return plugin


@pytest.fixture
def make_args(plugin, model):
    """Factory of resolved `ServerArgs` for the small Llama on this machine's device."""
    from sglang.srt.server_args import ServerArgs

    device_args = {} if torch.cuda.is_available() else cpu.SERVER_ARGS

    def make(**kwargs):
        return ServerArgs(
            **{"model_path": model, "speculative_algorithm": "self-sparse", **device_args, **kwargs}
        )

    return make
