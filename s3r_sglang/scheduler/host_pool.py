"""Host memory for the KV of paused requests, and the copies from and to the device.

A fixed number of blocks in one buffer, allocated once and pinned on CUDA. The rows of a request lie scattered
over the pages and layers of the device pool; blocks are gathered into a contiguous staging buffer on the device,
and each crosses the link as one asynchronous copy (29 MB for the Qwen3-1.7B shape), which the copy engine carries
without taking multiprocessors from the round that runs meanwhile. `s3r_sglang/bench/host_link.py` measures.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from s3r_sglang.config import ConfigError
from s3r_sglang.kernels import implementation
from s3r_sglang.sglang_symbols import ALLOC_MEMORY_FUNCS, HostTensorAllocator, cuda_host_unregister

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 256
# Blocks that one launch gathers or scatters (117 MB for the Qwen3-1.7B shape). The round that follows a pause
# waits until all is gathered, but not for the copies of the last so many blocks.
STAGED_BLOCKS = 4
# Unless the size is configured: at most this share of the host memory that is free at start-up, and at most so
# many bytes, since a server with much memory would spend its start-up on pinning.
FREE_MEMORY_SHARE = 0.25
MAX_BYTES = 32_000_000_000


class HostPool:
    """Blocks of host memory, and copies of KV rows between them and the device pool.

    All copies run in one stream, in the order of the calls: so a block that is freed while its copy still runs may
    be handed out again at once.

    Args:
        keys, values: per layer, the device pool's rows [pages, ...]; all of one shape and dtype.
        num_blocks: blocks of the pool.
        block_tokens: tokens per block.

    Attributes:
        used, peak: blocks in use now, and at most so far.
    """

    def __init__(
        self,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        num_blocks: int,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self._layers = [buffer.flatten(1) for buffer in (*keys, *values)]
        sample = self._layers[0]
        self._kernels = implementation(sample, "kv_rows")
        self._pointers = torch.tensor([layer.data_ptr() for layer in self._layers], device=sample.device)
        self._token = len(self._layers) * sample.shape[1]
        self._module = torch.get_device_module(sample.device)
        self._stream = self._module.Stream()
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._free = list(range(num_blocks))
        self.peak = 0
        self._block = block_tokens * self._token
        self._pinned = sample.is_cuda and num_blocks > 0
        self._host = _allocate((num_blocks, self._block), sample.dtype, self._pinned)
        staged = min(num_blocks, STAGED_BLOCKS) * self._block
        self._staging = torch.empty(staged, dtype=sample.dtype, device=sample.device)

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, tokens: int) -> list[int] | None:
        """Blocks for `tokens` tokens, or None if there are not enough."""
        count = -(-tokens // self.block_tokens)
        if count > len(self._free):
            return None
        blocks, self._free = self._free[:count], self._free[count:]
        self.peak = max(self.peak, self.used)
        return blocks

    def free(self, blocks: list[int]) -> None:
        self._free += blocks

    def save(self, blocks: list[int], pages: torch.Tensor) -> None:
        """Copy the rows of `pages` [n] int64 to `blocks`; work queued from now on may overwrite the pages."""
        gathered = self._module.Event()
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            for group, part in self._groups(blocks, pages):
                self._kernels.gather_rows(
                    self._layers, self._pointers, part, self._staging, self.block_tokens
                )
                gathered.record()
                for host, staged in self._pieces(group, len(part)):
                    host.copy_(staged, non_blocking=True)
        # On the device, the host does not wait.
        self._module.current_stream().wait_event(gathered)

    def load(self, blocks: list[int], pages: torch.Tensor):
        """Copy `blocks` to the rows of `pages` [n] int64, which the caller keeps until the returned event."""
        done = self._module.Event()
        # The pages may be of a request that has just ended, and the round in flight still writes to them. The
        # scheduler's stream is behind all of that round: SGLang's WAR barrier waits for whole forwards of ours.
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            for group, part in self._groups(blocks, pages):
                for host, staged in self._pieces(group, len(part)):
                    staged.copy_(host, non_blocking=True)
                self._kernels.scatter_rows(
                    self._layers, self._pointers, part, self._staging, self.block_tokens
                )
            done.record()
        return done

    def wait(self, event) -> None:
        """Order work queued from now on behind `event`; the host does not wait."""
        self._module.current_stream().wait_event(event)

    def close(self) -> None:
        """Unpin the buffer: left to the kernel, the end of the process may stall for tens of seconds."""
        if self._pinned:
            self._module.synchronize()
            cuda_host_unregister(self._host)
            self._pinned = False

    def _groups(self, blocks: list[int], pages: torch.Tensor) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Blocks and their pages, as many as the staging buffer holds at a time."""
        parts = pages.split(STAGED_BLOCKS * self.block_tokens)
        starts = range(0, len(blocks), STAGED_BLOCKS)
        return zip((blocks[start : start + STAGED_BLOCKS] for start in starts), parts, strict=True)

    def _pieces(self, blocks: list[int], tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(host, staged) memory of each of `blocks`, which hold `tokens` tokens in all."""
        for number, block in enumerate(blocks):
            begin = number * self._block
            used = min(self._block, tokens * self._token - begin)
            yield self._host[block, :used], self._staging[begin : begin + used]


def block_bytes(keys: list[torch.Tensor], values: list[torch.Tensor]) -> int:
    """Size of one block for a pool with these rows."""
    return sum(BLOCK_TOKENS * layer[0].nbytes for layer in (*keys, *values))


def choose_num_blocks(host_gb: float | None, pages: int, slots: int, bytes_per_block: int, ranks: int) -> int:
    """Blocks of the host pool: as configured, or enough for all there is if host memory allows.

    Args:
        host_gb: configured size of this rank's pool in GB (10^9 bytes); None chooses.
        pages: pages of the device's KV pool.
        slots: requests at most; each may leave its last block partly empty.
        bytes_per_block: see `block_bytes`.
        ranks: processes of this server that share the host's memory.

    Raises:
        ConfigError: the configured size exceeds the memory that is free.
    """
    free = free_memory()
    if host_gb is None:
        most = min(MAX_BYTES, int(free * FREE_MEMORY_SHARE / ranks))
        return min(pages // BLOCK_TOKENS + slots, most // bytes_per_block)
    if host_gb * 1e9 * ranks > free:
        raise ConfigError(
            f"--s3r-kv-host-gb {host_gb} for each of {ranks} processes exceeds the {free / 1e9:.1f} GB of host "
            "memory that are free; lower it."
        )
    return int(host_gb * 1e9) // bytes_per_block


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that this process may still take: the machine's, or its container's if less."""
    free = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        details = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # Cached files count as used; the kernel gives their memory away when it is asked for.
        used -= int(details["active_file"]) + int(details["inactive_file"])
    except (OSError, ValueError, KeyError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))


def _allocate(shape: tuple[int, int], dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    # SGLang's: PyTorch's own pinned memory is rounded up to a power of two.
    return ALLOC_MEMORY_FUNCS["cuda"](
        shape, dtype=dtype, device="cpu", pin_memory=pinned, allocator=HostTensorAllocator()
    )
