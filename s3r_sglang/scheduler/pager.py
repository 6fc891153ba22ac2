"""Take the KV of single requests off the device and bring it back; when to do so is decided elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from s3r_sglang.scheduler.host_pool import HostPool
from s3r_sglang.sglang_symbols import Req, evict_from_tree_cache


@dataclass(eq=False)
class Paused:
    """A request that keeps its slot, hence seed, sparse index and bonus token, but not its KV on the device.

    Fields:
        req: the request. While it is paused, its `kv_committed_len` and `kv_allocated_len` say what it still
            holds: the prefix that lies in the radix cache, locked.
        start, length: positions start … length - 1 have their KV in `blocks`; `length` is L.
        blocks: blocks of the host pool.
        pages: [length - start] int64 pages of the device pool, once restoration has begun.
        copied: event behind the copy to `pages`.
        began: `time.perf_counter()` at the start of restoration.
    """

    req: Req
    start: int
    length: int
    blocks: list[int]
    pages: torch.Tensor | None = field(default=None, repr=False)
    copied: Any = field(default=None, repr=False)
    began: float = 0.0

    @property
    def num_pages(self) -> int:
        return self.length - self.start


class Pager:
    """Moves the KV of requests between SGLang's pools and the host pool.

    What of a request lies in the radix cache (its prompt, as a rule) is shared and stays where it is, locked.
    Pages that were reserved for the next round are given back without a copy.

    Args:
        allocator: SGLang's allocator of the KV pool, page size 1.
        req_to_token_pool: SGLang's request table.
        tree_cache: SGLang's prefix cache.
        host: the host pool.
    """

    def __init__(self, allocator: Any, req_to_token_pool: Any, tree_cache: Any, host: HostPool) -> None:
        self.allocator = allocator
        self.req_to_token_pool = req_to_token_pool
        self.tree_cache = tree_cache
        self.host = host

    @property
    def total_pages(self) -> int:
        return int(self.allocator.size)

    @property
    def free_pages(self) -> int:
        """Pages that can be had at once: free ones, and prefixes in the radix cache that nobody uses."""
        return self.allocator.available_size() + self.tree_cache.evictable_size()

    def pause(self, req: Req) -> Paused | None:
        """Move the KV of a request between two rounds to the host; None, no change, if the host pool is full."""
        start, length = req.cache_protected_len, req.kv_committed_len
        blocks = self.host.allocate(length - start)
        if blocks is None:
            return None
        held = self._row(req, start, req.kv.kv_allocated_len)
        if blocks:
            self.host.save(blocks, held[: length - start])
        self.allocator.free(held)
        _set_extent(req, start)
        return Paused(req, start, length, blocks)

    def begin_restore(self, paused: Paused) -> None:
        """Start the copy back; `num_pages` pages must be free."""
        evict_from_tree_cache(self.tree_cache, paused.num_pages)
        paused.pages = self.allocator.alloc(paused.num_pages)
        span = slice(paused.start, paused.length)
        self.req_to_token_pool.write((paused.req.req_pool_idx, span), paused.pages.to(torch.int32))
        _set_extent(paused.req, paused.length)
        paused.began = time.perf_counter()
        if paused.blocks:
            paused.copied = self.host.load(paused.blocks, paused.pages)

    def copied(self, paused: Paused) -> bool:
        """Whether the copy back has ended; never waits."""
        return paused.copied is None or paused.copied.query()

    def end_restore(self, paused: Paused) -> None:
        """Release the host memory of a request that decodes again."""
        self.host.free(paused.blocks)

    def drop(self, paused: Paused) -> None:
        """Forget the KV; what is left to the request is its slot and the locked prefix, for SGLang to release."""
        if paused.pages is not None:
            if paused.copied is not None:
                self.host.wait(paused.copied)  # before the pages can be written for others
            self.allocator.free(paused.pages)
            _set_extent(paused.req, paused.start)
        self.host.free(paused.blocks)

    def _row(self, req: Req, start: int, end: int) -> torch.Tensor:
        """A copy of the request's pages at positions start … end - 1, [n] int64."""
        return self.req_to_token_pool.req_to_token[req.req_pool_idx, start:end].to(torch.int64)


def _set_extent(req: Req, length: int) -> None:
    req.kv_committed_len = req.kv.kv_allocated_len = length
