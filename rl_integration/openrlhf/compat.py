"""Checks before any work: the tested versions, the signatures of what is replaced, the supported options."""

import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any

from s3r_sglang.rl_integration.openrlhf.runtime import has_gpu, installed

OPENRLHF = "0.11.2"

# What is replaced or relied on, by the names of its parameters.
_SIGNATURES = {
    "openrlhf.utils.get_strategy": "args",
    "openrlhf.trainer.ray.create_vllm_engines": "num_engines tensor_parallel_size pretrain seed full_determinism "
    "enable_prefix_caching enforce_eager max_model_len shared_pg gpu_memory_utilization vllm_enable_sleep "
    "logprobs_mode agent_func_path remote_rm_url max_images_per_prompt",
    "openrlhf.trainer.ray.vllm_engine.batch_vllm_engine_call": "engines method_name args rank_0_only kwargs",
    "openrlhf.trainer.ray.vllm_engine._load_agent_executor": "agent_func_path",
    "openrlhf.trainer.ppo_trainer.BasePPOTrainer.fit": "self global_step",
    "openrlhf.trainer.ppo_trainer.BasePPOTrainer.train_step": "self rollout_samples global_step",
    "openrlhf.trainer.ppo_trainer.BasePPOTrainer.save_logs_and_checkpoints": "self global_step logs_dict "
    "client_states",
    "openrlhf.trainer.ray.ppo_actor.ActorPPOTrainer.__init__": "self strategy actor ema_model actor_optim "
    "actor_scheduler ema_beta micro_train_batch_size buffer_limit buffer_cpu_offload eps_clip tokenizer "
    "dataloader_pin_memory vllm_engines kwargs",
    "openrlhf.trainer.ray.ppo_actor.ActorPPOTrainer._init_vllm_sync_group": "self backend",
    "openrlhf.trainer.ray.ppo_actor.ActorPPOTrainer.broadcast_to_vllm": "self",
    "openrlhf.trainer.ray.ppo_actor.ActorPPOTrainer.ppo_train": "self kl_ctl",
    "openrlhf.utils.agent.SingleTurnAgentExecutor.execute": "self prompt label sampling_params max_length "
    "hf_tokenizer llm_engine images",
    "openrlhf.utils.deepspeed.DeepspeedStrategy.get_ds_train_config": "self optim_dict max_norm",
}
_ENGINE_METHODS = (
    "generate_responses",
    "get_num_unfinished_requests",
    "sleep",
    "wake_up",
    "reset_prefix_cache",
)


class UnsupportedError(ValueError):
    """The run asks for something that has not been tested with S3R; the message names the flags."""


def require_tested_version() -> None:
    """Raise UnsupportedError unless the tested OpenRLHF is installed."""
    try:
        found = metadata.version("openrlhf")
    except metadata.PackageNotFoundError:
        raise UnsupportedError("OpenRLHF is not installed here: run `s3r-openrlhf setup`") from None
    if found != OPENRLHF:
        raise UnsupportedError(
            f"OpenRLHF {found} is not tested with S3R, {OPENRLHF} is: run `s3r-openrlhf setup`"
        )


def require_known_signatures() -> None:
    """Raise UnsupportedError if a function that is replaced or called has other parameters than the tested one."""
    for name, expected in _SIGNATURES.items():
        found = " ".join(_parameters(_resolve(name)))
        if found != expected:
            raise UnsupportedError(
                f"{name} has the parameters ({found}), not ({expected}): OpenRLHF was changed"
            )


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters, without the one that Ray adds to the methods of an actor class and of its bases."""
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"]


def _resolve(name: str) -> Callable[..., Any]:
    import pkgutil

    return pkgutil.resolve_name(name)


def require_supported(args: Any) -> None:
    """Raise UnsupportedError for options of OpenRLHF that are not tested with S3R; `args` is its namespace."""
    flash = installed("flash_attn")
    correction = args.algo.advantage.is_correction_level != "off"
    refused = {
        "without --vllm.num_engines: it is the number of rollout servers": not args.vllm.num_engines,
        "--ds.lora.rank: LoRA": args.ds.lora.rank > 0,
        "--ds.load_in_4bit: quantised training": args.ds.load_in_4bit,
        "--data.max_images_per_prompt: image input": args.data.max_images_per_prompt > 0,
        "--train.partial_rollout_enable: a response from two versions of the weights": (
            args.train.partial_rollout_enable
        ),
        "--vllm.sync_with_ray: weights through Ray's collectives": args.vllm.sync_with_ray,
        "--train.full_determinism_enable: bitwise reproducible rollouts": args.train.full_determinism_enable,
        "--ds.tensor_parallel_size: tensor-parallel training": args.ds.tensor_parallel_size > 1,
        "--train.colocate_all with --vllm.tensor_parallel_size above 1": (
            args.train.colocate_all and not args.train.async_enable and args.vllm.tensor_parallel_size > 1
        ),
        "--ds.packing_samples, --ds.ring_attn_size or --train.dynamic_batch_enable without flash-attn": (
            args.ds.packing_samples and not flash
        ),
        "--ds.attn_implementation flash_attention_2 without flash-attn: give sdpa or eager": (
            args.ds.attn_implementation == "flash_attention_2" and not flash
        ),
        "--algo.advantage.is_correction_level with --rollout.top_p below 1: the rollout's logprobs are those of "
        "the whole vocabulary": correction and args.rollout.top_p < 1,
        "--vllm.sync_backend nccl without a GPU: give gloo": args.vllm.sync_backend == "nccl"
        and not has_gpu(),
        "--ds.enable_sleep without a GPU: it offloads DeepSpeed's own Adam": (
            args.ds.enable_sleep and not has_gpu()
        ),
        f"--vllm.sync_backend {args.vllm.sync_backend}: neither nccl nor gloo": (
            args.vllm.sync_backend not in ("nccl", "gloo")
        ),
    }
    if found := [text for text, present in refused.items() if present]:
        raise UnsupportedError("not supported with S3R rollouts: " + "; ".join(found))


def require_engine_interface(engine: type) -> None:
    """Raise UnsupportedError if OpenRLHF's engine has methods with other parameters than ours."""
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

    theirs = RolloutRayActor.__ray_metadata__.modified_class
    for name in _ENGINE_METHODS:
        expected = _parameters(getattr(theirs, name))
        found = _parameters(getattr(engine, name))
        if found != expected:
            raise UnsupportedError(f"RolloutRayActor.{name} has the parameters {expected}, ours {found}")
