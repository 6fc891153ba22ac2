"""KV scheduling inside SGLang's scheduler: its batches in, its batches out; `core.py` decides."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from s3r_sglang.config import S3RConfig, config_of
from s3r_sglang.metrics import KVMetrics
from s3r_sglang.scheduler.aimd import AimdPolicy
from s3r_sglang.scheduler.batch import decode_batch
from s3r_sglang.scheduler.core import KVScheduler
from s3r_sglang.scheduler.host_pool import HostPool, block_bytes, choose_num_blocks
from s3r_sglang.scheduler.pager import Pager
from s3r_sglang.scheduler.stats import KVStats
from s3r_sglang.sglang_symbols import (
    FINISH_ABORT,
    AbortReq,
    Req,
    ScheduleBatch,
    get_alloc_reserve_per_decode,
    release_kv_cache,
    release_req,
    schedule_policy,
)

logger = logging.getLogger(__name__)

# Metrics are set at most this often; a round of the smallest model takes 10 ms.
METRICS_SECONDS = 0.2


class KVController:
    """Pauses and restores requests of one SGLang scheduler, and bounds what it admits.

    With policy `recompute` it only counts: SGLang then schedules as it does.

    Args:
        scheduler: SGLang's, completely built.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.config = _with_bounds(config_of(scheduler.server_args), int(scheduler.max_running_requests))
        self.offloads = self.config.kv_policy != "recompute"
        self.reserve = get_alloc_reserve_per_decode(scheduler.server_args)
        self.recomputed = 0
        self._host = self._allocate_host_pool()
        self.core = KVScheduler(
            Pager(
                scheduler.token_to_kv_pool_allocator,
                scheduler.req_to_token_pool,
                scheduler.tree_cache,
                self._host,
            ),
            limit=_limit(self.config, int(scheduler.max_running_requests)),
            reserve=self.reserve,
            headroom=int(self.config.kv_headroom * scheduler.max_total_num_tokens),
            recompute=self._recompute,
        )
        self._admission_closed = False
        self._rounds = self._prefills = 0
        self._next_metrics = 0.0
        self._idle = False
        reports = scheduler.ps.tp_rank == 0
        self._log_interval = scheduler.server_args.decode_log_interval if reports and self.offloads else 0
        self._metrics = KVMetrics(scheduler.ps.dp_rank or 0, enabled=reports)
        if self.offloads:
            logger.info(
                "S3R: KV policy %s, at first %d active requests at most; host pool of %d pages",
                self.config.kv_policy,
                self.core.limit,
                self._host.num_blocks * self._host.block_tokens,
            )

    # ---- SGLang's calls

    def next_batch(self, original: Callable[..., Any], running: ScheduleBatch, last: ScheduleBatch | None):
        """Around `Scheduler.get_next_batch_to_run`.

        A request that was restored joins the running batch first. Then room is made for a round of all requests
        that would decode, the running ones and those just prefilled. A prompt that is prefilled in chunks goes
        first, and keeps what admission has set aside for it: nothing is restored until its last chunk.
        """
        if self.offloads:
            running = self._rejoin(running)
            if self.scheduler.chunked_req is None:
                batches = [running]
                if last is not None and last.forward_mode.is_extend() and last is not running:
                    batches.append(last)
                self._make_room(batches)
                self.core.restore(_unfinished(batches))
            self._admit_by_what_fits(running, last)
            if self._admission_closed and self._admissible(len(running.reqs)) > 0:
                running.batch_is_full = self._admission_closed = False
        plan = original(self.scheduler, running_batch=running, last_batch=last)
        self._observe(plan.batch_to_run, plan.running_batch)
        return plan

    def admissible(self, allowed: int, active: int) -> int:
        """After `Scheduler.get_num_allocatable_reqs`: restoration before admission, and the limit C."""
        if not self.offloads:
            return allowed
        ours = self._admissible(active)
        # SGLang now takes the batch to be full until a request leaves it; the limit may rise before.
        self._admission_closed |= ours < allowed
        return min(ours, allowed)

    def abort(self, wanted: Callable[[Req], bool]) -> None:
        """End the paused requests that are `wanted`, with what they have generated, like running ones."""
        for one in self.core.away:
            if not wanted(one.req):
                continue
            req = self.core.remove(one)
            req.to_finish = FINISH_ABORT()
            req.update_finish_state()
            release_kv_cache(req, self.scheduler.tree_cache, is_insert=False)
            req.time_stats.set_completion_time()
            self.scheduler.output_streamer.stream_output([req], req.return_logprob)

    def give_up_all(self) -> None:
        """Queue all paused requests to be prefilled again, because the weights may change."""
        for one in self.core.away:
            self.core.give_up(one)

    def limit_length(self, req: Req, asked: int | None) -> None:
        """After `Scheduler.init_req_max_new_tokens`: refuse what cannot finish even alone in the KV pool.

        SGLang forgets the pages that a round reserves ahead, and would abort the request near its end.

        Args:
            req: a new request; its `max_new_tokens` is what SGLang made of `asked`.
            asked: None if the client set no limit: then the pool does, which must have room for a token.
        """
        total = self.core.pager.total_pages
        room = total - len(req.origin_input_ids) - self.reserve
        wanted = 1 if asked is None else asked
        if wanted <= room:
            req.sampling_params.max_new_tokens = min(req.sampling_params.max_new_tokens, room)
        elif req.to_finish is None:
            advice = f"lower max_new_tokens to {room}" if room > 0 else "shorten the prompt"
            is_set = self.scheduler.server_args.max_total_tokens is not None
            flag = "--max-total-tokens" if is_set else "--mem-fraction-static"
            req.set_finish_with_abort(
                f"The request needs up to {total - room + wanted} KV pages (prompt, max_new_tokens {wanted} and "
                f"{self.reserve} for a speculative round), but the KV pool has {total}: {advice}, or enlarge "
                f"the pool with {flag}."
            )

    def refuse(self, req: Req) -> None:
        """Answer a request that was refused when it arrived, instead of queueing it."""
        answer = AbortReq(rid=req.rid, finished_reason=req.to_finish.to_json())
        self.scheduler.ipc_channels.send_to_tokenizer.send_output(answer, req)
        req.time_stats.trace_ctx.abort(abort_info=answer.finished_reason)

    def stats(self) -> KVStats:
        return self._stats(self.scheduler.running_batch)

    def close(self) -> None:
        self._host.close()

    # ---- steps

    def _make_room(self, batches: Sequence[ScheduleBatch]) -> None:
        if self.core.fits(_unfinished(batches)):
            return
        self._settle()
        removed = set(self.core.make_room(_unfinished(batches)))
        for batch in batches:
            batch.filter_batch(keep_indices=[i for i, req in enumerate(batch.reqs) if req not in removed])

    def _settle(self) -> None:
        """Process the result of the round in flight, which overlap scheduling would do after the next launch.

        A paused request must stand between two rounds. To throw its round away and draw it again, as retraction
        may (it goes on at L + 1, with fresh noise), would bias the response here: noise is keyed by L, and the
        round has refreshed the index already. Costs a bubble of one launch each time that requests are paused.
        """
        scheduler = self.scheduler
        if scheduler.enable_overlap and scheduler.result_queue:
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
            # The event loop takes this for "a result is in the queue".
            scheduler.last_batch = None

    def _rejoin(self, running: ScheduleBatch) -> ScheduleBatch:
        if not self.core.restoring:
            return running
        restored = self.core.rejoin(self._agreed(self.core.copied()))
        if not restored:
            return running
        batch = decode_batch(self.scheduler, restored)
        if running.is_empty():
            return batch
        running.merge_batch(batch)
        return running

    def _admissible(self, active: int) -> int:
        return self.core.admissible(active, len(self.scheduler.waiting_queue))

    def _agreed(self, count: int) -> int:
        """The lowest count of all tensor-parallel ranks: copies end at different times."""
        if self.scheduler.ps.tp_size == 1:
            return count
        lowest = torch.tensor(count)
        torch.distributed.all_reduce(
            lowest, torch.distributed.ReduceOp.MIN, group=self.scheduler.tp_cpu_group
        )
        return int(lowest)

    def _recompute(self, req: Req) -> None:
        """Retract a request the way SGLang does."""
        scheduler = self.scheduler
        release_req(
            req=req,
            remaing_req_count=0,
            server_args=scheduler.server_args,
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
        )
        scheduler._add_request_to_queue(req, is_retracted=True)

    # ---- set-up and reports

    def _allocate_host_pool(self) -> HostPool:
        pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        blocks = 0
        if self.offloads:
            args = self.scheduler.server_args
            size = block_bytes(pool.k_buffer, pool.v_buffer)
            ranks = max(1, args.tp_size * args.dp_size // args.nnodes)
            # Not numpy's integers, of which SGLang makes its pool size: statistics go out as JSON.
            pages, slots = int(self.scheduler.max_total_num_tokens), int(self.scheduler.max_running_requests)
            wanted = choose_num_blocks(self.config.kv_host_gb, pages, slots, size, ranks)
            blocks = self._agreed(wanted)
        return HostPool(pool.k_buffer, pool.v_buffer, blocks)

    def _admit_by_what_fits(self, running: ScheduleBatch, last: ScheduleBatch | None) -> None:
        """Have SGLang's admission keep the headroom free, for one more request than there are.

        By default it sets a share of up to 4,096 tokens per request aside, which it adapts to keep retractions
        rare: the pool would never be under pressure, and slots would idle.
        """
        active = len({*running.reqs, *(last.reqs if last is not None else ())})
        room = self.core.room_to_grow(active + 1)
        if room < schedule_policy.CLIP_MAX_NEW_TOKENS:
            # Found full when more was set aside for each: SGLang would not look again until a request ends.
            running.batch_is_full = False
        schedule_policy.CLIP_MAX_NEW_TOKENS = room
        self.scheduler.new_token_ratio_tracker.current = 1.0

    def _observe(self, batch: ScheduleBatch | None, running: ScheduleBatch) -> None:
        if batch is not None and batch.forward_mode.is_extend():
            self._prefills += 1
        elif batch is not None and batch.forward_mode.is_decode():
            self.core.update_limit()
            self._rounds += 1
            if self._log_interval and self._rounds % self._log_interval == 0:
                logger.info("S3R KV: %s", self._stats(running).line())
        # The state in which the replica falls idle is shown at once: it may sleep then.
        falls_idle, self._idle = batch is None and not self._idle, batch is None
        if self._metrics.enabled and (falls_idle or time.perf_counter() >= self._next_metrics):
            self._metrics.show(asdict(self._stats(running)))
            self._next_metrics = time.perf_counter() + METRICS_SECONDS

    def _stats(self, running: ScheduleBatch) -> KVStats:
        return self.core.stats(
            policy=self.config.kv_policy,
            active=len(_unfinished([running])),
            waiting=len(self.scheduler.waiting_queue),
            recomputed=self.recomputed,
            tokens=self.scheduler.draft_worker.metrics.tokens,
            rounds=self._rounds,
            prefills=self._prefills,
        )


def _unfinished(batches: Sequence[ScheduleBatch]) -> list[Req]:
    return [req for batch in batches for req in batch.reqs if not req.finished()]


def _with_bounds(config: S3RConfig, slots: int) -> S3RConfig:
    """`config` with the limits that follow from the number of slots filled in."""
    if config.kv_policy == "offload":
        return config.model_copy(update={"kv_limit": min(config.kv_limit or slots, slots)})
    if config.kv_policy == "aimd":
        rule = config.aimd(slots)
        return config.model_copy(update={"aimd_minimum": rule.minimum, "aimd_maximum": rule.maximum})
    return config


def _limit(config: S3RConfig, slots: int) -> int | AimdPolicy:
    return AimdPolicy(config.aimd(slots)) if config.kv_policy == "aimd" else config.kv_limit or slots
