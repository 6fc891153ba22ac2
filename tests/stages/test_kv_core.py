"""Whom to pause, restore and admit, written out; memory is a ledger of page counts here.

`test_offload_schedules.py` runs the same decisions over SGLang's pools.
"""

import re
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from s3r_sglang.scheduler.aimd import AimdConfig, AimdPolicy

RESERVE = 4


@dataclass(eq=False)
class Request:
    """`kv` positions of which the first `prefix` are shared; the pages of the next round are not yet reserved."""

    rid: str
    kv_committed_len: int
    prefix: int = 0
    max_new: int = 1000
    to_finish: object = None
    output_ids: list = field(default_factory=list)

    def __post_init__(self):
        self.kv = SimpleNamespace(kv_allocated_len=self.kv_committed_len)
        self.sampling_params = SimpleNamespace(max_new_tokens=self.max_new)


class Ledger:
    """Stands in for the pager: counts pages, moves none. `host` is the number of pages that the host can take."""

    def __init__(self, total: int, free: int, host: int = 1000) -> None:
        self.total_pages, self.free_pages, self.host_free = total, free, host
        self.copies_done, self.dropped = 0, set()

    def pause(self, req):
        from s3r_sglang.scheduler.pager import Paused

        pages = req.kv_committed_len - req.prefix
        if pages > self.host_free:
            return None
        self.host_free -= pages
        self.free_pages += pages
        return Paused(req, req.prefix, req.kv_committed_len, [])

    def begin_restore(self, paused):
        paused.began = time.perf_counter()
        self.free_pages -= paused.num_pages
        assert self.free_pages >= 0

    def copied(self, paused):
        return self.copies_done > 0

    def end_restore(self, paused):
        self.host_free += paused.num_pages

    def drop(self, paused):
        self.host_free += paused.num_pages
        self.dropped.add(paused.req)


@pytest.fixture
def scheduler():
    """Factory: (KVScheduler over a ledger, list of the requests that were to be recomputed)."""

    def make(free, total=1000, host=1000, limit=100, headroom=RESERVE):
        from s3r_sglang.scheduler.core import KVScheduler

        ledger, recomputed = Ledger(total, free, host), []

        def recompute(req):
            recomputed.append(req.rid)
            ledger.free_pages += req.prefix if req in ledger.dropped else req.kv_committed_len

        return KVScheduler(ledger, limit, RESERVE, headroom, recompute), recomputed

    return make


def names(requests):
    return [getattr(one, "req", one).rid for one in requests]


def test_the_least_kv_goes_first_and_no_more_than_needed(scheduler):
    core, _ = scheduler(free=0)
    active = [Request("a", 30), Request("b", 7), Request("c", 50), Request("d", 9)]
    # 4 x 4 pages are missing; b gives 7, d gives 9: then two requests need 8, and 16 are free.
    assert names(core.make_room(active)) == ["b", "d"]
    assert names(core.paused) == ["b", "d"]
    assert core.pager.free_pages == 16
    assert core.fits([active[0], active[2]])


def test_nothing_happens_while_a_round_fits(scheduler):
    core, _ = scheduler(free=8)
    assert core.make_room([Request("a", 3), Request("b", 3)]) == []
    assert core.paused == []


def test_the_last_one_is_never_paused(scheduler):
    core, recomputed = scheduler(free=0)
    assert core.make_room([Request("a", 5)]) == []
    assert (core.paused, recomputed) == ([], [])


def test_one_that_is_being_aborted_is_left_to_end(scheduler):
    core, _ = scheduler(free=0)
    active = [Request("a", 5, to_finish="abort"), Request("b", 50), Request("c", 60)]
    assert names(core.make_room(active)) == ["b"]


def test_a_full_host_pool_means_recomputation_of_that_request(scheduler):
    core, recomputed = scheduler(free=0, host=10)
    removed = core.make_room([Request("a", 8), Request("b", 9), Request("c", 60), Request("d", 61)])
    assert names(removed) == ["a", "b"]
    assert (names(core.paused), recomputed) == (["a"], ["b"])


def test_locked_prefixes_are_given_up_for_the_last_one_newest_first(scheduler):
    core, recomputed = scheduler(free=0)
    active = [Request("a", 20, prefix=20), Request("b", 30, prefix=30), Request("c", 40)]
    # Pausing a and b frees nothing: all their KV lies in shared prefixes, which stay locked.
    assert names(core.make_room(active)) == ["a", "b"]
    assert (names(core.paused), recomputed) == (["a"], ["b"])


def test_restoration_is_in_order_and_needs_headroom_for_all(scheduler):
    core, _ = scheduler(free=0, headroom=3 * 10)
    running = [Request("x", 500), Request("y", 500)]
    core.paused = [core.pager.pause(one) for one in (Request("a", 20), Request("b", 5))]
    core.pager.free_pages = 20 + 3 * 10 - 1
    core.restore(running)
    assert names(core.restoring) == [], "b would fit, but a comes first"
    core.pager.free_pages += 1
    core.restore(running)
    assert (names(core.restoring), names(core.paused)) == (["a"], ["b"])


def test_headroom_of_a_request_near_its_end_is_what_it_can_use(scheduler):
    core, _ = scheduler(free=0, headroom=2 * 100)
    ending = Request("a", 20, max_new=3)
    core.make_room([ending, Request("x", 500)])
    core.pager.free_pages = 20 + (3 + RESERVE) + 100
    core.restore([Request("x", 500)])
    assert names(core.restoring) == ["a"]


def test_the_limit_bounds_restoration(scheduler):
    core, _ = scheduler(free=0, limit=2)
    running = [Request("x", 500), Request("y", 500)]
    core.make_room([Request("a", 20), *running])
    core.pager.free_pages = 900
    core.restore(running)
    assert names(core.restoring) == []
    core.restore(running[:1])
    assert names(core.restoring) == ["a"]


def test_somebody_comes_back_if_nothing_runs(scheduler):
    """Without headroom, and at the cost of what newer ones still hold."""
    core, recomputed = scheduler(free=0, headroom=50)
    first, second, third = (
        Request("a", 30, prefix=10),
        Request("b", 31, prefix=11),
        Request("c", 32, prefix=12),
    )
    core.make_room([first, second, third])
    core.paused = [core.pager.pause(one) for one in (first, second, third)]
    core.pager.free_pages = 10
    core.restore([])
    # 20 pages and the reserve of a are needed, 10 are there, 12 come from c, 11 from b.
    assert recomputed == ["c", "b"]
    assert (names(core.restoring), core.paused) == (["a"], [])


def test_nothing_is_admitted_before_what_is_away(scheduler):
    core, _ = scheduler(free=0, limit=10)
    assert [core.admissible(active, 100) for active in (0, 4, 9, 10, 12)] == [10, 6, 1, 0, 0]
    core.make_room([Request("a", 20), Request("x", 500)])
    assert core.admissible(0, 1) == 0
    core.pager.free_pages = 900
    core.restore([])
    assert core.admissible(0, 1) == 0, "on its way back"
    assert core.copied() == 0
    core.pager.copies_done = 1
    assert names(core.rejoin(core.copied())) == ["a"]
    assert core.admissible(1, 1) == 9


def test_requests_start_together(scheduler):
    """5 of 160: one prefill for five responses that ended, not five."""
    core, _ = scheduler(free=0, limit=160)
    assert [core.admissible(active, 100) for active in (0, 155, 156, 159, 160)] == [160, 5, 0, 0, 0]
    assert [core.admissible(157, waiting) for waiting in (1, 3, 4)] == [3, 3, 0], "no more than wait"


def test_the_limit_follows_utilization_and_backlog(scheduler):
    policy = AimdPolicy(AimdConfig(minimum=10, maximum=100, increase=5, decrease=0.5, backlog_threshold=1))
    core, _ = scheduler(free=0, total=1000, limit=policy)
    core.update_limit()
    assert core.limit == 50
    core.pager.free_pages = 100
    core.update_limit()
    assert core.limit == 50, "between the thresholds"
    core.make_room([Request("a", 1), Request("b", 1), Request("c", 1), Request("x", 700)])
    core.pager.free_pages = 0
    core.paused = [core.pager.pause(Request(rid, 1)) for rid in "ab"]
    core.pager.free_pages = 100
    core.update_limit()
    assert core.limit == 25, "a backlog of two"
    core.pager.free_pages = 300
    core.update_limit()
    assert core.limit == 30


def test_without_pressure_all_slots_are_used(scheduler):
    """300 slots are 300 active requests, though the paper's limit is 256."""
    from s3r_sglang.config import S3RConfig

    rule = S3RConfig().aimd(300)
    assert (rule.minimum, rule.maximum) == (188, 300)
    core, _ = scheduler(free=10**6, total=10**6, limit=AimdPolicy(rule))
    active = 0
    while admitted := core.admissible(active, 300 - active):
        active += admitted
        core.update_limit()
    assert active == 300


def test_totals(scheduler):
    core, _ = scheduler(free=0)
    core.pager.host = SimpleNamespace(block_tokens=8, used=2, peak=3, num_blocks=5)
    again = Request("a", 20)
    for _ in range(2):
        core.pager.free_pages = 0
        core.make_room([again, Request("x", 500)])
        core.pager.free_pages, core.pager.copies_done = 900, 1
        core.restore([Request("x", 500)])
        core.rejoin(core.copied())
    stats = core.stats("offload", active=7, waiting=2, recomputed=3, tokens=400, rounds=9)
    assert (stats.pauses, stats.repauses, stats.restores, stats.recomputed) == (2, 1, 2, 3)
    assert (stats.pages_out, stats.pages_in, stats.pages_per_1000_tokens) == (40, 40, 200.0)
    assert (stats.host_pages_used, stats.host_pages_peak, stats.host_pages_capacity) == (16, 24, 40)
    assert (stats.active, stats.paused, stats.waiting, stats.limit) == (7, 0, 2, 100)
    assert (stats.rounds, stats.prefills) == (9, 0)
    assert 0 <= stats.restore_seconds < 1
    assert "pauses 2 (1 again), pages moved per 1,000 tokens 200.0" in stats.line()


@pytest.mark.parametrize(
    ("prompt", "asked", "pool_flag", "limit", "advice"),
    [
        (50, None, None, 46, None),
        (95, None, None, 1, None),
        (96, None, None, None, "up to 101 KV pages .* shorten the prompt, .* --mem-fraction-static"),
        (50, 46, True, 46, None),
        (50, 47, True, None, "up to 101 KV pages .* lower max_new_tokens to 46, .* --max-total-tokens"),
    ],
)
def test_a_response_gets_what_the_pool_has_or_an_error(prompt, asked, pool_flag, limit, advice):
    """100 pages, 4 of them for a round."""
    from s3r_sglang.scheduler.controller import KVController

    controller = SimpleNamespace(
        core=SimpleNamespace(pager=SimpleNamespace(total_pages=100)),
        reserve=RESERVE,
        scheduler=SimpleNamespace(server_args=SimpleNamespace(max_total_tokens=pool_flag and 100)),
    )
    refusals = []
    request = SimpleNamespace(
        origin_input_ids=[0] * prompt,
        sampling_params=SimpleNamespace(max_new_tokens=1000 if asked is None else asked),
        to_finish=None,
        set_finish_with_abort=refusals.append,
    )
    KVController.limit_length(controller, request, asked)
    if advice is None:
        assert (request.sampling_params.max_new_tokens, refusals) == (limit, [])
    else:
        assert re.search(advice, *refusals)
