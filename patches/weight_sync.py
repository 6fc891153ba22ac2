"""Weight updates, sleep and wake, in the main process: the snapshot rule, whoever asks for the change."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from s3r_sglang.config import serves_rollouts

# How long a release waits for the scheduler to finish the round in flight when all responses are already out.
IDLE_SECONDS = 10.0

# The manager whose weights this task is updating.
_updating: ContextVar[Any] = ContextVar("s3r_updating", default=None)


def _applies(manager: Any) -> bool:
    return serves_rollouts(manager.server_args)


async def update_weights(original: Callable[..., Awaitable[Any]], manager, obj, request=None):
    """Around `update_weights_from_*`: with no group in flight, and not while the weights are released.

    Plain requests are SGLang's to wait for: it takes its writer lock, see `acquire_writer`. It does not on a
    paused engine, which never finishes what it holds; `wait=true` would not end there. What is aborted there ends
    at once if it waits for its turn, as after a pause of mode `retract`, but not if it is running.

    Raises:
        Refused: 409, which SGLang's endpoints return; 400 for a parameter `wait` that is no boolean.
    """
    from s3r_sglang.server.gate import Refused, gate_of, wants_wait
    from s3r_sglang.server.protocol import SESSION_HEADER

    if not _applies(manager):
        return await original(manager, obj, request)
    gate = gate_of(manager)
    wait = wants_wait({} if request is None else request.query_params)
    _refuse_if_released(gate)
    aborts = getattr(obj, "abort_all_requests", False)
    if aborts:
        manager.abort_request(abort_all=True)
        if manager.is_pause:
            await gate.drained(IDLE_SECONDS)
    async with _exclusive(gate, request, aborts or wait):
        # Only now: while it waited, the engine may have gone to sleep, or another sender may have taken over.
        _refuse_if_released(gate)
        if request is not None and (session := request.headers.get(SESSION_HEADER)) is not None:
            gate.check_session(session)
        # Counted before the outcome is known: an update that failed half-way has changed weights too.
        gate.weight_updates += 1
        if manager.is_pause:
            await settle(manager)
        token = _updating.set(manager)
        try:
            result = await original(manager, obj, request)
        except Refused:  # before the schedulers heard of it
            raise
        except BaseException:
            await _take_note(manager, gate, success=False)
            raise
        finally:
            _updating.reset(token)
        await _take_note(manager, gate, success=result[0])
        return result


async def continue_generation(original: Callable[..., Awaitable[Any]], manager, obj):
    """Around `continue_generation`: groups that came while the engine was paused have been held."""
    from s3r_sglang.server.gate import gate_of

    result = await original(manager, obj)
    if _applies(manager):
        await gate_of(manager).notify()
    return result


async def _take_note(manager, gate, success: bool) -> None:
    """Tell the gate how an update has ended. Until the schedulers have said more, a failure is the worst one."""
    gate.updated(success, mixed=gate.mixed or not success)
    if gate.mixed:
        states = await manager.get_internal_state()
        gate.mixed = any(state["s3r_weights_mixed"] for state in states)


async def acquire_writer(original: Callable[..., Awaitable[None]], lock) -> None:
    """Around `RWLock.acquire_writer`: an update that has waited for all requests also waits for the scheduler.

    From here on no request can reach it until the lock is free again.
    """
    await original(lock)
    manager = _updating.get()
    if manager is not None:
        try:
            await settle(manager)
        except BaseException:
            await lock.release_writer()
            raise


async def release_memory(original: Callable[..., Awaitable[Any]], manager, obj, request=None):
    """Around `release_memory_occupation`: only from an idle engine, because SGLang's scheduler asserts that.

    Raises:
        Refused: 409 if requests are in progress, 400 for an unknown tag.
    """
    from s3r_sglang.server.gate import Refused, gate_of, wants_wait

    if not _applies(manager):
        return await original(manager, obj, request)
    gate = gate_of(manager)
    tags = _tags(obj)
    wait = wants_wait({} if request is None else request.query_params)
    async with _exclusive(gate, request, wait):
        if manager.rid_to_state and not wait and not manager.is_pause:
            raise Refused(409, "Requests are in progress: abort them, or add ?wait=true.")
        async with _without_requests(manager):
            gate.sleeping |= tags
            return await original(manager, obj, request)


async def resume_memory(original: Callable[..., Awaitable[Any]], manager, obj, request=None):
    """Around `resume_memory_occupation`: awake again once everything is back."""
    from s3r_sglang.server.gate import gate_of

    if not _applies(manager):
        return await original(manager, obj, request)
    gate, tags = gate_of(manager), _tags(obj)
    # A release that overlaps would be taken for undone: its tags leave `sleeping` when this one returns.
    async with gate.changing:
        result = await original(manager, obj, request)
        gate.sleeping -= tags
    return result


@contextlib.asynccontextmanager
async def _exclusive(gate, request, wait: bool) -> AsyncIterator[None]:
    """`Gate.exclusive`, unless the client goes away before its turn.

    A change that nobody waits for any more must not happen later: a trainer that has given up sends again, and
    nobody wakes an engine that went to sleep behind its back.
    """
    from s3r_sglang.server.disconnect import unless_disconnected

    async with contextlib.AsyncExitStack() as stack:
        entered = stack.enter_async_context(gate.exclusive(wait))
        await (entered if request is None else unless_disconnected(request, entered))
        yield


def _refuse_if_released(gate) -> None:
    from s3r_sglang.server.gate import Refused

    if "weights" in gate.sleeping:
        raise Refused(409, 'The weights are released: call /resume_memory_occupation with tags ["weights"].')


@contextlib.asynccontextmanager
async def _without_requests(manager) -> AsyncIterator[None]:
    """An idle scheduler that no request can reach: on a paused engine, or under the lock that requests share."""
    async with contextlib.nullcontext() if manager.is_pause else manager.model_update_lock.writer_lock:
        await settle(manager)
        yield


async def settle(manager) -> None:
    """Wait until every scheduler is idle, and drop its prefix cache.

    The last response is out before the scheduler has dropped its last batch, and under overlap scheduling one
    more round is in flight. An update or release that arrives just then fails an assertion and ends the server.

    Raises:
        Refused: 409 if a scheduler still has requests after `IDLE_SECONDS`, as those of a paused engine.
    """
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    from s3r_sglang.server.gate import Refused

    replies = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=IDLE_SECONDS))
    if not all(reply.success for reply in replies):
        raise Refused(
            409, "The engine holds unfinished requests, which must end under their weights: abort them first."
        )


def _tags(obj) -> set[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    from s3r_sglang.server.gate import Refused

    tags = set(obj.tags or GPU_MEMORY_ALL_TYPES)
    if unknown := tags - set(GPU_MEMORY_ALL_TYPES):
        raise Refused(400, f"Unknown tags {sorted(unknown)}; known are {', '.join(GPU_MEMORY_ALL_TYPES)}.")
    return tags
