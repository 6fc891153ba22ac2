"""Every symbol of SGLang 0.5.17 that the round imports, in one place.

A port to another release starts here, in `compat.py` and in `patches/`.
"""

from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.environ import envs
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch, release_req
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_reserve_per_decode,
    get_req_to_token_extra_context_len,
)
from sglang.srt.mem_cache.common import evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS, HostTensorAllocator
from sglang.srt.mem_cache.pool_host.common import _cuda_host_unregister as cuda_host_unregister
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

__all__ = [
    "ALLOC_MEMORY_FUNCS",
    "FINISH_ABORT",
    "AbortReq",
    "AttentionBackend",
    "BaseSpecWorker",
    "CaptureHiddenMode",
    "DFlashVerifyInput",
    "ForwardBatch",
    "ForwardContext",
    "ForwardMode",
    "GenerationBatchResult",
    "HostTensorAllocator",
    "KVWriteLoc",
    "LogitsProcessorOutput",
    "ModelRunner",
    "OutputLogprobProcessor",
    "ParallelState",
    "RadixAttention",
    "Req",
    "SamplingBatchInfo",
    "ScheduleBatch",
    "ServerArgs",
    "SpecInput",
    "SpecInputType",
    "TorchNativeAttnBackend",
    "TpModelWorker",
    "cuda_host_unregister",
    "envs",
    "evict_from_tree_cache",
    "forward_context",
    "get_alloc_reserve_per_decode",
    "get_or_create_global_graph_memory_pool",
    "get_req_to_token_extra_context_len",
    "graph_capture",
    "model_capture_mode",
    "release_kv_cache",
    "release_req",
    "schedule_policy",
]
