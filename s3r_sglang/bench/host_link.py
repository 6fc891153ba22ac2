"""How fast the KV of paused requests crosses the host link: python -m s3r_sglang.bench.host_link.

Saves and loads scattered pages of a KV pool with the engine's `HostPool`, and compares with plain copies of
contiguous pinned memory. Also shown: the time that queueing takes the host, and the time for which the device's
main stream waits until the pages may be overwritten. What comes back is checked by value.
"""

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from s3r_sglang.scheduler.host_pool import BLOCK_TOKENS, HostPool

# The Qwen3-1.7B shape: 28 layers of 8 KV heads, head size 128, 115 kB per token.
LAYERS, HEADS, HEAD_SIZE = 28, 8, 128
POOL_PAGES = 65_536
LENGTHS = (256, 2_048, 16_384)
REPEATS = 11
GOAL = 0.8


def timed(call: Callable[[], object]) -> tuple[float, float, float]:
    """Medians in milliseconds: until all work is done, until `call` returns, until the main stream is free."""
    times = []
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start = time.perf_counter()
        first.record()
        call()
        queued = time.perf_counter()
        last.record()
        torch.cuda.synchronize()
        done = time.perf_counter()
        times.append((1000 * (done - start), 1000 * (queued - start), first.elapsed_time(last)))
    total, host, stream = zip(*times, strict=True)
    return statistics.median(total), statistics.median(host), statistics.median(stream)


def link_rates() -> dict[str, float]:
    """GB/s of plain copies of 1 GiB of pinned memory."""
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    out, *_ = timed(lambda: host.copy_(device, non_blocking=True))
    back, *_ = timed(lambda: device.copy_(host, non_blocking=True))
    return {"out": device.nbytes / out / 1e6, "back": device.nbytes / back / 1e6}


def measure(
    pool: HostPool, buffers: list[torch.Tensor], tokens: int, links: dict[str, float], table: Table
) -> None:
    """Add the rows of requests of `tokens` tokens; raises AssertionError if their KV comes back wrong."""
    order = torch.randperm(POOL_PAGES, device="cuda")
    source, target = order[:tokens], order[-tokens:]
    blocks = pool.allocate(tokens)
    size = tokens * sum(buffer[0].nbytes for buffer in buffers)
    calls = {"out": lambda: pool.save(blocks, source), "back": lambda: pool.load(blocks, target)}
    for direction, call in calls.items():
        total, host, stream = timed(call)
        rate = size / total / 1e6
        share = rate / links[direction]
        columns = [f"{rate:.1f}", f"{share:.0%}", f"{host:.2f}", f"{stream:.2f}"]
        table.add_row(
            f"{tokens:,}", f"{size / 1e6:.0f}", direction, *columns, "ok" if share >= GOAL else "missed"
        )
    for buffer in buffers:
        assert torch.equal(buffer[source], buffer[target]), "KV came back wrong"
    pool.free(blocks)


def main() -> None:
    shape = (POOL_PAGES, HEADS, HEAD_SIZE)
    buffers = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2 * LAYERS)]
    pool = HostPool(buffers[:LAYERS], buffers[LAYERS:], max(LENGTHS) // BLOCK_TOKENS)
    links = link_rates()
    table = Table(
        title=f"Host link: {links['out']:.1f} GB/s out, {links['back']:.1f} GB/s back (plain copies)"
    )
    for name in (
        "tokens",
        "MB",
        "direction",
        "GB/s",
        "of the link",
        "host ms",
        "stream ms",
        f"goal {GOAL:.0%}",
    ):
        table.add_column(name, justify="right")
    for tokens in LENGTHS:
        measure(pool, buffers, tokens, links, table)
    pool.close()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
