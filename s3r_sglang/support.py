"""Modes and models that self-sparse decoding refuses at start-up, a sentence each.

Everything refused here would either change what is sampled, or has not been tested with the draft's view
of the KV pool. Nothing is switched off silently.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from s3r_sglang.config import ConfigError

if TYPE_CHECKING:
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

GPU_BACKENDS = ("fa3", "triton", "flashinfer")
CPU_BACKENDS = ("torch_native",)
KV_DTYPES = ("auto", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32")

# Switches that must be off. The value is what to do instead.
_SWITCHES = {
    "enable_dp_attention": "drop --enable-dp-attention (plain --dp-size replicas work)",
    "enable_prefill_cp": "drop --enable-prefill-cp",
    "enable_hierarchical_cache": "drop --enable-hierarchical-cache",
    "enable_lmcache": "drop --enable-lmcache",
    "enable_flexkv": "drop --enable-flexkv",
    "radix_cache_backend": "drop --radix-cache-backend",
    "enable_hisparse": "drop --enable-hisparse",
    "enable_page_major_kv_layout": "drop --enable-page-major-kv-layout",
    "enable_unified_memory": "drop --enable-unified-memory",
    "enable_lora": "drop --enable-lora and serve merged weights",
    "lora_paths": "drop --lora-paths and serve merged weights",
    "enable_mixed_chunk": "drop --enable-mixed-chunk",
    "enable_two_batch_overlap": "drop --enable-two-batch-overlap",
    "enable_pdmux": "drop --enable-pdmux",
    "enable_streaming_session": "drop --enable-streaming-session",
    "enable_return_hidden_states": "drop --enable-return-hidden-states",
    # Both would also record the experts of the draft's forwards.
    "enable_return_routed_experts": "drop --enable-return-routed-experts",
    "enable_return_indexer_topk": "drop --enable-return-indexer-topk",
    # Gives every request a grammar that masks tokens, and there is no mask inside a block.
    "enable_strict_thinking": "drop --enable-strict-thinking",
    "enable_mis": "drop --enable-mis",
    "enable_custom_logit_processor": "drop --enable-custom-logit-processor",
    "enable_deterministic_inference": "drop --enable-deterministic-inference (per-request seeds reproduce)",
    "is_embedding": "drop --is-embedding",
    "dllm_algorithm": "drop --dllm-algorithm",
    "smg_grpc_mode": "serve over HTTP, where requests are checked",
    "use_ray": "drop --use-ray (its scheduler actors do not load plugins)",
    "speculative_draft_model_path": "drop --speculative-draft-model-path (the model drafts for itself)",
    "speculative_draft_attention_backend": "drop --speculative-draft-attention-backend",
    "speculative_draft_window_size": "drop --speculative-draft-window-size",
    "speculative_token_map": "drop --speculative-token-map",
    "speculative_use_rejection_sampling": "drop --speculative-use-rejection-sampling (always on)",
    "enable_multi_layer_eagle": "drop --enable-multi-layer-eagle",
    "speculative_adaptive": "drop --speculative-adaptive",
}

# Fields that allow one value only.
_ONLY = {
    "page_size": 1,
    "pp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    # Tokenizer workers do not load plugins, so requests would not be checked there.
    "tokenizer_worker_num": 1,
    "disaggregation_mode": "null",
    "decoupled_spec_role": "null",
    # Thresholds below 1 accept more than exact sampling allows.
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
}


def refuse_unsupported(server_args: "ServerArgs") -> None:
    """Raise ConfigError with one sentence if the engine's mode or model is not supported."""
    from sglang.srt.arg_groups.overrides import resolved_view

    from s3r_sglang.plugin import assert_installed

    # This runs in the main process, where requests are checked; the worker asserts in its own.
    assert_installed()
    view = resolved_view(server_args)
    for reason in (*_mode_faults(view), *_model_faults(server_args.get_model_config())):
        raise ConfigError(f"Self-sparse speculative decoding {reason}.")


def _mode_faults(view: Any) -> Iterator[str]:
    from sglang.srt.arg_groups.overrides import attention_backends_of
    from sglang.srt.environ import envs

    if envs.SGLANG_RUST_SERVER.get():
        yield "does not support SGLANG_RUST_SERVER: unset it, requests are not checked there"
    for field, advice in _SWITCHES.items():
        if getattr(view, field):
            yield f"does not support {field}: {advice}"
    for field, allowed in _ONLY.items():
        if getattr(view, field) != allowed:
            yield f"needs --{field.replace('_', '-')} {allowed}, not {getattr(view, field)}"
    if view.kv_cache_dtype not in KV_DTYPES:
        yield f"needs an unquantized KV cache: set --kv-cache-dtype auto, not {view.kv_cache_dtype}"
    backends = CPU_BACKENDS if view.device == "cpu" else GPU_BACKENDS
    for backend in attention_backends_of(view):
        if backend not in backends:
            yield f"needs --attention-backend {' or '.join(backends)} on {view.device}, not {backend}"


def _model_faults(model: "ModelConfig") -> Iterator[str]:
    from sglang.srt.configs.model_config import AttentionArch

    text = model.hf_text_config
    kinds = {
        "multi-head latent attention": model.attention_arch == AttentionArch.MLA,
        "sliding-window attention": model.is_hybrid_swa or model.sliding_window_size is not None,
        "chunked local attention": model.attention_chunk_size is not None or model.is_local_attention_model,
        "attention sinks": model.has_attention_sinks,
        "attention logit soft-capping": bool(getattr(text, "attn_logit_softcapping", None)),
        "dual-chunk attention": hasattr(model.hf_config, "dual_chunk_attention_config"),
        "keys and values of different widths": model.has_asymmetric_kv,
        "recurrent or hybrid layers": _has_recurrent_state(text)
        or model.linear_attn_registry_result is not None,
        "an encoder": model.is_encoder_decoder,
        "image, audio or video input": model.is_multimodal or model.model_is_mrope,
        "no token generation": not model.is_generation,
    }
    for kind, present in kinds.items():
        if present:
            yield (
                f"does not support models with {kind} ({model.hf_config.architectures[0]}): "
                "choose one with full multi-head or grouped-query attention"
            )


def refuse_unsupported_layers(model: "torch.nn.Module") -> None:
    """Raise ConfigError unless every attention layer of the loaded model attends causally and in full.

    Looks at the layers, because a model class may set what its `config.json` does not name (Grok caps logits
    at 30 by default), and our attention kernels know none of it.
    """
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    for layer in model.modules():
        if not isinstance(layer, RadixAttention):
            continue
        kinds = {
            "attention logit soft-capping": layer.logit_cap > 0,
            "sliding-window attention": layer.sliding_window_size > 0,
            "cross-attention": layer.is_cross_attention,
            "bidirectional attention": layer.attn_type != AttentionType.DECODER,
            "length-dependent attention temperature": layer.xai_temperature_len > 0,
            "keys and values of different widths": layer.qk_head_dim != layer.v_head_dim,
        }
        for kind, present in kinds.items():
            if present:
                raise ConfigError(
                    f"Self-sparse speculative decoding does not support {kind}, which layer {layer.layer_id} of "
                    f"{type(model).__name__} uses: choose a model with full causal attention."
                )


def _has_recurrent_state(text_config: Any) -> bool:
    """Whether some layer keeps a state other than KV (Mamba, linear attention) or attends sparsely."""
    if set(getattr(text_config, "layer_types", None) or ()) - {"full_attention"}:
        return True
    state = ("mamba_", "ssm_", "linear_", "hybrid_override", "attn_type_list", "sparse_attention")
    return any(name.startswith(state) and value for name, value in text_config.to_dict().items())
