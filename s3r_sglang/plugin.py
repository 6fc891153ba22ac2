"""Entry point that SGLang loads in the main process and in every scheduler process.

SGLang logs a plugin or hook that fails and goes on without it. A server would then decode in other ways than
asked for, so both processes check with `assert_installed` before they serve.
"""

import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from s3r_sglang.compat import require_tested_sglang
from s3r_sglang.patches import (
    allocation_sizing,
    http_server,
    kv_cache_builder,
    kv_scheduling,
    logits_processor,
    schedule_batch,
    scheduler,
    server_args,
    tokenizer_manager,
    verify_input,
    weight_loading,
    weight_sync,
    weight_updater,
)


@dataclass(frozen=True)
class Hook:
    """One SGLang function we wrap: `kind` is the name of a member of SGLang's HookType."""

    target: str
    kind: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class HookStatus:
    """Whether `name` is in place in this process, and if not, what is wrong."""

    name: str
    ok: bool
    detail: str = ""


# Every function of SGLang that we wrap; patches/INVENTORY.md says why.
_SRT = "sglang.srt"
_TOKENIZER = f"{_SRT}.managers.tokenizer_manager.TokenizerManager"
_UPDATER = f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WORKER = f"{_SRT}.managers.tp_worker.BaseTpWorker"
_SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
HOOKS = (
    Hook(f"{_SRT}.server_args.ServerArgs.__init__", "AROUND", server_args.init_with_s3r_fields),
    Hook(f"{_SRT}.server_args.prepare_server_args", "AROUND", server_args.one_sentence_on_the_command_line),
    Hook(f"{_TOKENIZER}._create_tokenized_object", "AROUND", tokenizer_manager.check_request),
    Hook(f"{_TOKENIZER}._send_one_request", "BEFORE", tokenizer_manager.seed_parallel_sample),
    Hook(f"{_TOKENIZER}._calculate_spec_decoding_metrics", "AFTER", tokenizer_manager.add_meta_info),
    Hook(f"{_TOKENIZER}.update_weights_from_disk", "AROUND", weight_sync.update_weights),
    Hook(f"{_TOKENIZER}.update_weights_from_tensor", "AROUND", weight_sync.update_weights),
    Hook(f"{_TOKENIZER}.update_weights_from_distributed", "AROUND", weight_sync.update_weights),
    Hook(f"{_TOKENIZER}.update_weights_from_ipc", "AROUND", weight_sync.update_weights),
    Hook(f"{_TOKENIZER}.continue_generation", "AROUND", weight_sync.continue_generation),
    Hook(f"{_SRT}.utils.aio_rwlock.RWLock.acquire_writer", "AROUND", weight_sync.acquire_writer),
    Hook(f"{_TOKENIZER}.release_memory_occupation", "AROUND", weight_sync.release_memory),
    Hook(f"{_TOKENIZER}.resume_memory_occupation", "AROUND", weight_sync.resume_memory),
    Hook(f"{_SRT}.utils.common.set_uvicorn_logging_configs", "AFTER", http_server.mount_rollout_service),
    Hook(f"{_WORKER}.update_weights_from_disk", "AROUND", weight_loading.load_whole_or_refuse),
    Hook(f"{_WORKER}.update_weights_from_tensor", "AROUND", weight_loading.load_all_or_refuse),
    Hook(f"{_WORKER}.update_weights_from_distributed", "AROUND", weight_loading.load_all_or_refuse),
    Hook(f"{_WORKER}.update_weights_from_ipc", "AROUND", weight_loading.load_or_refuse),
    Hook(f"{_UPDATER}.flush_cache_after_weight_update", "AROUND", weight_updater.flush_with_every_update),
    Hook(f"{_UPDATER}.release_memory_occupation", "AROUND", weight_updater.release_once),
    Hook(f"{_UPDATER}.resume_memory_occupation", "AROUND", weight_updater.resume_once),
    Hook(
        f"{_SRT}.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        "AFTER",
        allocation_sizing.cover_the_reserve,
    ),
    Hook(f"{_SRT}.mem_cache.kv_cache_builder.get_draft_kv_pool", "AROUND", kv_cache_builder.no_draft_kv_pool),
    Hook(
        f"{_SRT}.speculative.spec_info.create_dummy_verify_input", "AROUND", verify_input.chain_verify_input
    ),
    Hook(
        f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
        "AROUND",
        verify_input.captured_verify_input,
    ),
    Hook(f"{_SCHEDULER}.get_internal_state", "AFTER", scheduler.add_internal_state),
    Hook(f"{_SCHEDULER}.__init__", "AFTER", kv_scheduling.attach),
    Hook(f"{_SCHEDULER}.get_next_batch_to_run", "AROUND", kv_scheduling.next_batch),
    Hook(f"{_SCHEDULER}.get_num_allocatable_reqs", "AFTER", kv_scheduling.bound_admission),
    Hook(f"{_SCHEDULER}._add_request_to_queue", "AROUND", kv_scheduling.enqueue),
    Hook(f"{_SCHEDULER}.init_req_max_new_tokens", "AROUND", kv_scheduling.refuse_larger_than_the_pool),
    Hook(f"{_SCHEDULER}.abort_request", "BEFORE", kv_scheduling.abort_paused),
    Hook(f"{_SCHEDULER}.pause_generation", "BEFORE", kv_scheduling.retract_paused),
    Hook(f"{_SCHEDULER}.is_fully_idle", "AFTER", kv_scheduling.busy_while_paused),
    Hook(f"{_SCHEDULER}.release_host_resources", "AFTER", kv_scheduling.unpin),
    Hook(
        f"{_SRT}.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._get_total_uncached_sizes",
        "AFTER",
        kv_scheduling.count_pages_on_the_way,
    ),
    Hook(
        f"{_SRT}.managers.scheduler_components.load_inquirer.SchedulerLoadInquirer.get_loads",
        "AFTER",
        kv_scheduling.count_paused_in_load,
    ),
    Hook(
        f"{_SRT}.layers.logits_processor.LogitsProcessor._copy_logits_to_buffer",
        "AROUND",
        logits_processor.keep_dtype,
    ),
    Hook(
        f"{_SRT}.managers.schedule_batch.Req.update_finish_state",
        "AROUND",
        schedule_batch.first_end_of_a_block,
    ),
    Hook(
        f"{_SRT}.managers.schedule_batch.Req._compute_max_prefix_len",
        "AFTER",
        schedule_batch.leave_the_prompts_last_queries,
    ),
)
FIELDS = f"{_SRT}.server_args.ServerArgs (fields)"
ALGORITHM = f"{_SRT}.speculative.spec_registry (algorithm)"


def register() -> None:
    """Install everything we change in SGLang; the algorithm last, so that a failure leaves it unknown."""
    require_tested_sglang()

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from s3r_sglang.algorithm import register_algorithm

    server_args.add_fields()
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    if "S3R_BENCH_PROBE" in os.environ:
        from s3r_sglang.bench import probe

        probe.register_hooks()
    register_algorithm()


def assert_installed() -> None:
    """Raise RuntimeError with the list of what is not in place in this process."""
    require_tested_sglang()
    broken = [f"{status.name}: {status.detail}" for status in verify_installed() if not status.ok]
    if broken:
        raise RuntimeError(
            "S3R refuses to serve because its hooks on SGLang are not all active "
            f"(another plugin, or SGLANG_PLUGINS, may be in the way): {'; '.join(broken)}."
        )


def verify_installed() -> list[HookStatus]:
    """Check the live SGLang symbols of this process, one status per change we rely on."""
    from sglang.srt.speculative.spec_registry import get_spec

    from s3r_sglang.algorithm import NAMES, S3RAlgorithm

    fields = server_args.has_fields()
    known = all(isinstance(get_spec(name), S3RAlgorithm) for name in NAMES)
    return [
        HookStatus(FIELDS, fields, "" if fields else "the s3r_* fields are missing"),
        HookStatus(ALGORITHM, known, "" if known else f"{' and '.join(NAMES)} are not registered"),
        *map(_status, HOOKS),
    ]


def _status(hook: Hook) -> HookStatus:
    try:
        live = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as error:
        return HookStatus(hook.target, False, f"does not exist ({error})")
    link = next((link for link in _wrappers(live) if _hook_of(link) is hook.function), None)
    if link is None:
        return HookStatus(hook.target, False, "is not wrapped")
    stale = sorted(_modules_holding(link.__wrapped__))
    if stale:
        return HookStatus(hook.target, False, f"is bypassed by an earlier import in {', '.join(stale)}")
    return HookStatus(hook.target, True)


def _wrappers(function: Any) -> Iterator[Any]:
    """`function` and what it wraps, from the outside in."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _hook_of(wrapper: Any) -> Any:
    """The hook that a wrapper made by SGLang's HookRegistry calls, or None."""
    return inspect.getclosurevars(wrapper).nonlocals.get("hook") if inspect.isfunction(wrapper) else None


def _modules_holding(original: Any) -> Iterator[str]:
    """Modules that still hold the unwrapped function under a name, from `from module import name`."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("sglang.", "__main__")) and any(
            value is original for value in vars(module).values()
        ):
            yield name
