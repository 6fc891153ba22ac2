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
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

__all__ = [
    "AttentionBackend",
    "BaseSpecWorker",
    "CaptureHiddenMode",
    "DFlashVerifyInput",
    "ForwardBatch",
    "ForwardContext",
    "ForwardMode",
    "GenerationBatchResult",
    "KVWriteLoc",
    "LogitsProcessorOutput",
    "ModelRunner",
    "OutputLogprobProcessor",
    "ParallelState",
    "RadixAttention",
    "Req",
    "ScheduleBatch",
    "ServerArgs",
    "SpecInput",
    "SpecInputType",
    "TorchNativeAttnBackend",
    "TpModelWorker",
    "envs",
    "forward_context",
    "get_or_create_global_graph_memory_pool",
    "get_req_to_token_extra_context_len",
    "graph_capture",
    "model_capture_mode",
]
