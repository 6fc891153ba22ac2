"""Random schedules over SGLang's own pools and radix cache: pages add up, KV survives, each request ends once.

The model is replaced by a rule that says which KV a token has at a position, so that every read can be checked.
"""

import random
from array import array
from dataclasses import dataclass, field

import pytest
import torch

from s3r_sglang.scheduler import core
from s3r_sglang.scheduler.aimd import AimdConfig, AimdPolicy
from s3r_sglang.scheduler.core import KVScheduler
from s3r_sglang.scheduler.host_pool import HostPool
from s3r_sglang.scheduler.pager import Pager

LAYERS, WIDTH, BLOCK_TOKENS = 2, 3, 4
DRAFT = 2
RESERVE = 2 * (DRAFT + 1)


@pytest.fixture(scope="module", autouse=True)
def server_args():
    """SGLang's release of a request's KV asks for them."""
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(speculative_algorithm="SELF_SPARSE") as args:
        # A hook reads it if an engine of another test has loaded the plugin; SGLang guards resolved arguments.
        object.__setattr__(args, "s3r_prompt_queries", 1)
        yield args


class SlowPager(Pager):
    """Copies take a while, as on a GPU: whether they have ended is asked some times in vain, and until then the
    pages hold something else."""

    def __init__(self, *args, chance: random.Random) -> None:
        super().__init__(*args)
        self.chance = chance
        self.on_the_way = {}

    def begin_restore(self, paused) -> None:
        super().begin_restore(paused)
        layers = self.host._layers
        self.on_the_way[paused] = [layer[paused.pages] for layer in layers]
        for layer in layers:
            layer[paused.pages] = torch.nan

    def copied(self, paused) -> bool:
        if self.chance.random() < 0.6:
            return False
        if paused in self.on_the_way:
            for layer, rows in zip(self.host._layers, self.on_the_way.pop(paused), strict=True):
                layer[paused.pages] = rows
        return super().copied(paused)


@dataclass
class World:
    """One replica: pools, requests in each state, and a scheduling loop like SGLang's.

    Rounds commit 1 … k + 1 tokens; prompts share prefixes; the pool holds a third of what all requests come to.
    """

    seed: int
    waiting: list = field(default_factory=list)
    running: list = field(default_factory=list)
    finished: list = field(default_factory=list)
    aborted: list = field(default_factory=list)
    recomputed: int = 0

    def __post_init__(self) -> None:
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.chunk_cache import ChunkCache
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self.chance = chance = random.Random(self.seed)
        self.radix = chance.random() < 0.8
        count = chance.randint(6, 16)
        self.requests = [self._request(i) for i in range(count)]
        sizes = [len(r.origin_input_ids) + r.sampling_params.max_new_tokens + RESERVE for r in self.requests]
        # At least the largest request, as admission demands, plus one page: SGLang's bound is strict.
        self.pages = max(max(sizes) + 1, sum(sizes) // chance.choice([2, 3, 5]))
        slots = chance.randint(2, count)
        kv = MHATokenToKVPool(self.pages, 1, torch.float32, 1, WIDTH, LAYERS, "cpu", False)
        self.kv = [*kv.k_buffer, *kv.v_buffer]
        self.allocator = TokenToKVPoolAllocator(self.pages, torch.float32, "cpu", kv, need_sort=False)
        self.table = ReqToTokenPool(slots, 200, "cpu", False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
        )
        self.tree = RadixCache(params) if self.radix else ChunkCache(params)
        blocks = chance.choice([2, 100, 100])
        self.host = HostPool(kv.k_buffer, kv.v_buffer, blocks, BLOCK_TOKENS)
        pager = SlowPager(self.allocator, self.table, self.tree, self.host, chance=chance)
        limit = slots if chance.random() < 0.5 else AimdPolicy(AimdConfig.for_slots(slots))
        self.core = KVScheduler(pager, limit, RESERVE, chance.choice([0, 60]), self._recompute)
        self.waiting = list(self.requests)

    def _request(self, number: int):
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        # Few different prompts, and prefixes of them: much is shared.
        stem = random.Random(self.seed + self.chance.randint(0, 2))
        prompt = array("q", [stem.randint(0, 3) for _ in range(self.chance.randint(3, 30))])
        req = Req(f"{number}", "", prompt, SamplingParams(max_new_tokens=self.chance.randint(1, 90)))
        req.end = len(prompt) + req.sampling_params.max_new_tokens
        return req

    def rows(self, req, start: int, end: int) -> torch.Tensor:
        """The KV that positions start … end - 1 must have, [end - start, WIDTH]: all that came before counts."""
        tokens = torch.tensor([*req.origin_input_ids, *req.output_ids], dtype=torch.float32)
        weights = torch.arange(1, len(tokens) + 1)
        state = (tokens * weights).cumsum(0)[start:end]
        return state[:, None] + torch.arange(WIDTH) / WIDTH

    def write(self, req, start: int, end: int, value: torch.Tensor | float) -> None:
        pages = self.table.req_to_token[req.req_pool_idx, start:end].long()
        for i, layer in enumerate(self.kv):
            layer[pages, 0] = value + 1000 * i

    def check_kv(self, req) -> None:
        length = req.kv_committed_len
        pages = self.table.req_to_token[req.req_pool_idx, :length].long()
        expected = self.rows(req, 0, length)
        for i, layer in enumerate(self.kv):
            assert torch.equal(layer[pages, 0], expected + 1000 * i), "KV of other tokens"

    def _recompute(self, req) -> None:
        from sglang.srt.managers.schedule_batch import release_req
        from sglang.srt.runtime_context import get_server_args

        release_req(
            req=req,
            remaing_req_count=0,
            server_args=get_server_args(),
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            hisparse_coordinator=None,
        )
        self.recomputed += 1
        self.waiting.append(req)

    # ---- one iteration of the scheduler

    def step(self) -> None:
        self.running += self.core.rejoin(self.core.copied())
        removed = self.core.make_room(self.running)
        self.running = [req for req in self.running if req not in removed]
        assert self.core.fits(self.running)
        self.core.restore(self.running)
        if not self._prefill() and self.running:
            self._round()
            self.core.update_limit()

    def _prefill(self) -> bool:
        """Admit one request if it fits with the headroom of all, like SGLang's PrefillAdder."""
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.mem_cache.common import evict_from_tree_cache, maybe_cache_unfinished_req

        if not self._admissible():
            return False
        req = self.waiting[0]
        req.init_next_round_input(self.tree)
        self.tree.inc_lock_ref(req.last_node)
        cached, length = len(req.prefix_indices), len(req.full_untruncated_fill_ids)
        growth = self.core.growth([*self.running, req]) if self.running else 1
        if length - cached + growth > self.core.pager.free_pages:
            self.tree.dec_lock_ref(req.last_node)
            assert self.running or self.core.away, "a request waits although nothing runs"
            return False
        self.waiting.pop(0)
        req.set_extend_range(cached, length)
        self.table.alloc([req])
        evict_from_tree_cache(self.tree, length - cached)
        self.table.write((req.req_pool_idx, slice(0, cached)), req.prefix_indices.int())
        pages = self.allocator.alloc(length - cached)
        self.table.write((req.req_pool_idx, slice(cached, length)), pages.int())
        req.kv, req.is_retracted = ReqKvInfo(kv_allocated_len=length, swa_evicted_seqlen=0), False
        req.kv_committed_len = length
        self.write(req, cached, length, self.rows(req, cached, length))
        req.output_ids.append(self.chance.randint(0, 3))
        if self._finish(req):
            return True
        maybe_cache_unfinished_req(req, self.tree)
        self.running.append(req)
        return True

    def _admissible(self) -> bool:
        allowed = self.core.admissible(len(self.running), len(self.waiting))
        return bool(self.waiting) and min(allowed, self.table.available_size()) > 0

    def _round(self) -> None:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        for req in self.running:
            missing = max(0, req.kv_committed_len + RESERVE - req.kv.kv_allocated_len)
            evict_from_tree_cache(self.tree, missing)
            pages = self.allocator.alloc(missing)
            assert pages is not None, "a round was run that does not fit"
            start = req.kv.kv_allocated_len
            self.table.write((req.req_pool_idx, slice(start, start + missing)), pages.int())
            req.kv.kv_allocated_len += missing
            self.write(req, req.kv_committed_len, req.kv_committed_len + DRAFT + 1, -1.0)  # drafts
        for req in list(self.running):
            self.check_kv(req)
            count = self.chance.randint(1, DRAFT + 1)
            start = req.kv_committed_len
            req.output_ids.extend(self.chance.randint(0, 3) for _ in range(count))
            req.kv_committed_len += count
            self.write(req, start, start + count, self.rows(req, start, start + count))
            if self._finish(req):
                self.running.remove(req)

    def _finish(self, req) -> bool:
        from sglang.srt.mem_cache.common import release_kv_cache

        if len(req.origin_input_ids) + len(req.output_ids) < req.end:
            return False
        self.check_kv(req)
        release_kv_cache(req, self.tree)
        self.finished.append(req)
        return True

    def disturb(self) -> None:
        """Now and then abort a request that is away or let all of them be recomputed, as a pause does."""
        from sglang.srt.mem_cache.common import release_kv_cache

        if self.core.away and self.chance.random() < 0.04:
            req = self.core.remove(self.chance.choice(self.core.away))
            release_kv_cache(req, self.tree, is_insert=False)
            self.aborted.append(req)
        elif self.chance.random() < 0.02:
            for one in self.core.away:
                self.core.give_up(one)

    # ---- what must hold after every iteration

    def check(self) -> None:
        away, core = self.core.away, self.core
        states = [self.waiting, self.running, self.finished, self.aborted, [one.req for one in away]]
        assert sorted(r.rid for state in states for r in state) == sorted(r.rid for r in self.requests)
        assert not set(core.paused) & set(core.restoring)
        held = {}
        for req in [*self.running, *(one.req for one in core.restoring)]:
            # All tokens but the last one have KV.
            assert req.kv_committed_len == len(req.origin_input_ids) + len(req.output_ids) - 1
            assert req.kv_committed_len <= req.kv.kv_allocated_len
            span = slice(req.cache_protected_len, req.kv.kv_allocated_len)
            for page in self.table.req_to_token[req.req_pool_idx, span].tolist():
                assert held.setdefault(page, req.rid) == req.rid, f"page {page} has two owners"
        for one in core.paused:
            assert one.req.kv.kv_allocated_len == one.req.cache_protected_len == one.start
            assert one.length == len(one.req.origin_input_ids) + len(one.req.output_ids) - 1
        free = self.allocator.free_pages.tolist()
        assert not held.keys() & set(free), "a page that is free is in use"
        assert len(set(free)) == len(free), "a page is free twice"
        protected = self.tree.protected_size() if self.radix else 0
        assert len(free) + self.tree.evictable_size() + protected + len(held) == self.pages
        blocks = [block for one in away for block in one.blocks]
        assert len(set(blocks)) == len(blocks) == self.host.used
        assert self.host.used + len(self.host._free) == self.host.num_blocks
        occupied = len(self.running) + len(away)
        assert self.table.available_size() == self.table.size - occupied


def run(seed: int) -> World:
    world = World(seed)
    for _ in range(2000):
        if not (world.waiting or world.running or world.core.away):
            break
        world.step()
        world.check()
        world.disturb()
        world.check()
    else:
        pytest.fail("the schedule does not end")
    return world


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_twenty_random_schedules(first, monkeypatch):
    # These limits are below 32; here some requests do wait for others to start with them.
    monkeypatch.setattr(core, "START_TOGETHER", 3)
    worlds = [run(seed) for seed in range(first, first + 20)]
    for world in worlds:
        assert len(world.finished) + len(world.aborted) == len(world.requests)
        for req in world.finished:
            assert len(req.origin_input_ids) + len(req.output_ids) >= req.end
        assert world.host.used == 0
        assert world.table.available_size() == world.table.size
        assert world.core.pager.free_pages == world.pages, "all that is left is unused prefixes"
    stats = [world.core.stats("aimd", 0, 0, recomputed=world.recomputed) for world in worlds]
    assert sum(one.pauses for one in stats) > 10
    assert sum(one.restores for one in stats) > 5
    assert sum(one.recomputed for one in stats) > 0
