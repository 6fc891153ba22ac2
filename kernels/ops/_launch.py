"""Launch choices the attention kernels share.

They are made on the host from shapes alone, so that a CUDA graph may hold the launch.
"""

import functools

import torch
import triton

# Programs of the last split to arrive are found by counting arrivals per (request, KV head). Kernels split
# only while there are fewer pairs than this, so one buffer of this size per device serves all launches.
MAX_SPLIT_PAIRS = 1024


@functools.lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 under the interpreter, which runs programs in turn."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_splits(device: torch.device, pairs: int, programs_per_sm: int, max_splits: int) -> int:
    """Splits of the KV of each (request, KV head) pair, a power of two, that give every SM about
    `programs_per_sm` programs.
    """
    wanted = programs_per_sm * num_multiprocessors(device) // max(pairs, 1)
    splits = max(1, min(wanted, max_splits))
    return 1 << (splits.bit_length() - 1) if pairs <= MAX_SPLIT_PAIRS else 1


def even_splits(device: torch.device, pairs: int, programs_per_sm: int, max_splits: int) -> int:
    """Splits of each pair with which the programs come in whole waves of `programs_per_sm` per SM.

    For kernels whose programs are long, and of which an SM holds only that many: a last wave that is half
    empty costs more than the merging of splits. The fewest splits, a power of two, whose waves are 90% full.
    """
    slots = programs_per_sm * num_multiprocessors(device)
    choices = [1 << i for i in range(max(1, max_splits).bit_length())]
    share = {splits: pairs * splits / (triton.cdiv(pairs * splits, slots) * slots) for splits in choices}
    return next((splits for splits in choices if share[splits] >= 0.9), max(choices, key=share.__getitem__))


@functools.lru_cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel can start before the one in front of it has ended (programmatic dependent launch).

    It then waits for that one's results itself, by `gdc_wait`. From Hopper on.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@functools.lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have; plenty under the interpreter."""
    if device.type != "cuda":
        return 1 << 30
    index = torch.cuda.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


def dot_precision(dtype: torch.dtype) -> str:
    """Input precision of tl.dot: float32 inputs as three TF32 products, which keep about 21 bits.

    The scalar float32 product ("ieee") spills registers at these tile sizes, 5 KB a thread in verification.
    """
    return "tf32x3" if dtype == torch.float32 else "tf32"


def block_of(size: int, minimum: int = 16) -> int:
    """The power of two that covers `size`; tl.dot wants at least 16."""
    return max(minimum, triton.next_power_of_2(size))


_arrivals: dict[torch.device, torch.Tensor] = {}


def arrival_counters(device: torch.device) -> torch.Tensor:
    """Zeroed int32 [MAX_SPLIT_PAIRS] counters of a device; a kernel leaves them zero again.

    Launches that use them must be ordered on one stream, as the layers of a forward pass are.

    Raises:
        RuntimeError: first use inside a CUDA graph capture; the zeros would exist only after a replay.
    """
    if device not in _arrivals:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run the attention kernel once before capturing it in a CUDA graph")
        _arrivals[device] = torch.zeros(MAX_SPLIT_PAIRS, dtype=torch.int32, device=device)
    return _arrivals[device]
