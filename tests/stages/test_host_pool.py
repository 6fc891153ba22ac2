"""Blocks of host memory: copies by value, sizes by rule."""

import pytest
import torch

from s3r_sglang.config import ConfigError

PAGES, HEADS, WIDTH, BLOCK = 40, 2, 3, 4


@pytest.fixture
def buffers():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((PAGES, HEADS, WIDTH), generator=generator) for _ in range(4)]


@pytest.fixture
def pool(buffers):
    from s3r_sglang.scheduler.host_pool import HostPool

    return HostPool(buffers[:2], buffers[2:], num_blocks=5, block_tokens=BLOCK)


@pytest.mark.parametrize("tokens", [1, 4, 5, 11])
def test_rows_return_to_other_pages(pool, buffers, tokens):
    """Scattered pages, last block partly empty; the pages are overwritten in between."""
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(tokens))
    source, target = order[:tokens], order[-tokens:]
    before = [buffer.clone() for buffer in buffers]
    blocks = pool.allocate(tokens)
    pool.save(blocks, source)
    for buffer in buffers:
        buffer[source] = torch.nan
    assert pool.load(blocks, target).query()
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer[target], old[source])
        rest = order[tokens:-tokens]
        assert torch.equal(buffer[rest], old[rest])


def test_blocks_of_two_requests_are_apart(pool, buffers):
    before = [buffer.clone() for buffer in buffers]
    first, second = pool.allocate(8), pool.allocate(9)
    assert len(set(first) | set(second)) == 2 + 3
    pool.save(first, torch.arange(8))
    pool.save(second, torch.arange(8, 17))
    for buffer in buffers:
        buffer.zero_()
    pool.load(second, torch.arange(8, 17))
    pool.load(first, torch.arange(8))
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer[:17], old[:17])


def test_capacity_is_bounded_and_returns(pool):
    blocks = pool.allocate(4 * BLOCK + 1)
    assert (len(blocks), pool.used, pool.peak) == (5, 5, 5)
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.free(blocks)
    assert (pool.used, pool.peak) == (0, 5)
    assert sorted(pool.allocate(5 * BLOCK)) == sorted(blocks)


def test_an_empty_pool_has_no_memory(buffers):
    from s3r_sglang.scheduler.host_pool import HostPool

    pool = HostPool(buffers[:2], buffers[2:], num_blocks=0)
    assert pool.allocate(1) is None
    pool.close()


def test_block_bytes(buffers):
    from s3r_sglang.scheduler.host_pool import BLOCK_TOKENS, block_bytes

    assert block_bytes(buffers[:2], buffers[2:]) == BLOCK_TOKENS * 4 * HEADS * WIDTH * 4


@pytest.mark.parametrize(
    ("host_gb", "pages", "ranks", "blocks"),
    [
        (
            None,
            25_600,
            1,
            100 + 16,
        ),  # all pages of the pool, and a partly empty block for each of 16 requests
        (None, 10**9, 1, 2_500),  # a quarter of 10 GB that are free, in blocks of 1 MB
        (None, 10**9, 4, 625),
        (3.0, 256, 1, 3_000),
        (40.0, 256, 1, 40_000),
        (0.0, 25_600, 1, 0),
    ],
)
def test_size_of_the_pool(monkeypatch, host_gb, pages, ranks, blocks):
    from s3r_sglang.scheduler import host_pool

    monkeypatch.setattr(host_pool, "free_memory", lambda: 50_000_000_000 if host_gb else 10_000_000_000)
    assert host_pool.choose_num_blocks(host_gb, pages, 16, 1_000_000, ranks) == blocks


def test_unless_configured_no_more_than_32_gb_are_pinned(monkeypatch):
    from s3r_sglang.scheduler import host_pool

    monkeypatch.setattr(host_pool, "free_memory", lambda: 2_000_000_000_000)
    assert host_pool.choose_num_blocks(None, 10**9, 16, 1_000_000, 1) == 32_000


def test_more_than_is_free_is_refused(monkeypatch):
    from s3r_sglang.scheduler import host_pool

    monkeypatch.setattr(host_pool, "free_memory", lambda: 10_000_000_000)
    with pytest.raises(
        ConfigError, match=r"--s3r-kv-host-gb 6.0 for each of 2 processes exceeds the 10.0 GB"
    ):
        host_pool.choose_num_blocks(6.0, 1, 1, 1, 2)


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 1 << 40), ("3000", 2000), ("500", 0), (None, 1 << 40)]
)
def test_a_container_has_less_memory_than_its_machine(monkeypatch, tmp_path, limit, expected):
    from s3r_sglang.scheduler import host_pool

    monkeypatch.setattr(
        host_pool.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1 << 40})
    )
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("1700\n")
        (tmp_path / "memory.stat").write_text("anon 900\nactive_file 500\ninactive_file 200\n")
    assert host_pool.free_memory(tmp_path) == expected
