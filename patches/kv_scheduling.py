"""Pause, restore and admit under KV pressure, in the scheduler process; `s3r_sglang/scheduler` does it."""

from typing import Any

from s3r_sglang.config import is_self_sparse


def controller_of(scheduler) -> Any:
    """The scheduler's KVController, or None if it does not run self-sparse decoding."""
    return getattr(scheduler, "s3r_kv", None)


def attach(_, scheduler, *args, **kwargs) -> None:
    """After `Scheduler.__init__`: the controller and its host memory, while a fault still ends the start-up."""
    if is_self_sparse(scheduler.server_args.speculative_algorithm):
        from s3r_sglang.scheduler.controller import KVController

        scheduler.s3r_kv = KVController(scheduler)
        # The only part of the scheduler that SGLang's memory check knows.
        scheduler.token_to_kv_pool_allocator.s3r_kv = scheduler.s3r_kv


def next_batch(original, scheduler, running_batch, last_batch):
    """Around `Scheduler.get_next_batch_to_run`: pause until the next round fits; restore when there is room."""
    controller = controller_of(scheduler)
    if controller is None:
        return original(scheduler, running_batch=running_batch, last_batch=last_batch)
    return controller.next_batch(original, running_batch, last_batch)


def bound_admission(allowed: int, scheduler, running_bs: int) -> int:
    """After `Scheduler.get_num_allocatable_reqs`: the concurrency limit; restoration goes first."""
    controller = controller_of(scheduler)
    return allowed if controller is None else controller.admissible(allowed, running_bs)


def enqueue(original, scheduler, req, is_retracted: bool = False) -> None:
    """Around `Scheduler._add_request_to_queue`: count what will be prefilled again, answer what is refused.

    SGLang has a refused request wait for its turn: for minutes where the slots are full.
    """
    controller = controller_of(scheduler)
    if controller is not None and is_retracted:
        controller.recomputed += 1
    elif controller is not None and req.to_finish is not None and not req.output_ids:
        controller.refuse(req)
        return
    original(scheduler, req, is_retracted)


def refuse_larger_than_the_pool(original, scheduler, req) -> None:
    """Around `Scheduler.init_req_max_new_tokens`: refuse what cannot finish in the KV pool, before it starts."""
    controller = controller_of(scheduler)
    asked, most = req.sampling_params.max_new_tokens, scheduler.max_new_tokens_limit
    if asked is not None and (most or 0) > 0:
        asked = min(asked, most)  # of SGLANG_MAX_NEW_TOKENS_LIMIT, to which SGLang lowers it
    original(scheduler, req)
    if controller is not None:
        controller.limit_length(req, asked)


def abort_paused(scheduler, recv_req) -> None:
    """Before `Scheduler.abort_request`: SGLang looks for requests in its queue and batches only."""
    controller = controller_of(scheduler)
    if controller is not None:
        controller.abort(lambda req: recv_req.abort_all or req.rid.startswith(recv_req.rid))


def retract_paused(scheduler, recv_req) -> None:
    """Before `Scheduler.pause_generation`: in mode `retract`, paused requests are retracted like running ones."""
    controller = controller_of(scheduler)
    if controller is not None and recv_req.mode == "retract":
        controller.give_up_all()


def busy_while_paused(idle: bool, scheduler, *args, **kwargs) -> bool:
    """After `Scheduler.is_fully_idle`: paused requests are in flight, so flushes and releases wait or fail."""
    controller = controller_of(scheduler)
    return idle and not (controller and controller.core.away)


def count_pages_on_the_way(sizes: tuple[int, int], checker) -> tuple[int, int]:
    """After `SchedulerInvariantChecker._get_total_uncached_sizes`: pages of requests that are being restored."""
    controller = getattr(checker.token_to_kv_pool_allocator, "s3r_kv", None)
    if controller is None:
        return sizes
    return sizes[0] + sum(one.num_pages for one in controller.core.restoring), sizes[1]


def count_paused_in_load(load: Any, inquirer) -> Any:
    """After `SchedulerLoadInquirer.get_loads`: paused requests are load, and in none of the queues it counts.

    Load balancing over replicas would otherwise send the most requests to the replica under most pressure.
    """
    controller = getattr(inquirer.token_to_kv_pool_allocator, "s3r_kv", None)
    if controller is not None:
        core = controller.core
        # Those on their way back are in no batch yet, but have their pages.
        host_tokens = sum(one.num_pages for one in core.paused)
        load.num_waiting_reqs += len(core.away)
        load.num_total_tokens += host_tokens
        load.num_active_tokens += host_tokens
        load.queues.paused += len(core.paused)
    return load


def unpin(_, scheduler) -> None:
    """After `Scheduler.release_host_resources`, which ends the process."""
    controller = controller_of(scheduler)
    if controller is not None:
        controller.close()
