"""Weight updates, sleep and wake, in the main process: the snapshot rule, whoever asks for the change."""

from collections.abc import Awaitable, Callable
from typing import Any

from s3r_sglang.config import is_self_sparse

# How long a release waits for the scheduler to finish the round in flight when all responses are already out.
IDLE_SECONDS = 10.0


def _applies(manager: Any) -> bool:
    return is_self_sparse(manager.server_args.speculative_algorithm)


def _wants_wait(request: Any) -> bool:
    return request is not None and request.query_params.get("wait", "").lower() in ("1", "true")


async def update_weights(original: Callable[..., Awaitable[Any]], manager, obj, request=None):
    """Around `update_weights_from_*`: with no group in flight, and not while the weights are released.

    A paused engine never finishes its groups, so `wait=true` would not end there.

    Raises:
        Refused: 409, which SGLang's endpoints return.
    """
    from s3r_sglang.server.gate import Refused, gate_of

    if not _applies(manager):
        return await original(manager, obj, request)
    gate = gate_of(manager)
    if "weights" in gate.sleeping:
        raise Refused(409, 'The weights are released: call /resume_memory_occupation with tags ["weights"].')
    aborts = getattr(obj, "abort_all_requests", False)
    if aborts:
        manager.abort_request(abort_all=True)
    elif manager.is_pause and gate.in_flight:
        raise gate.busy()
    async with gate.exclusive(wait=aborts or _wants_wait(request)):
        # Counted before the outcome is known: an update that failed half-way has changed weights too.
        gate.weight_updates += 1
        await settle(manager)
        return await original(manager, obj, request)


async def release_memory(original: Callable[..., Awaitable[Any]], manager, obj, request=None):
    """Around `release_memory_occupation`: only from an idle engine, because SGLang's scheduler asserts that.

    Raises:
        Refused: 409 if requests are in progress, 400 for an unknown tag.
    """
    from s3r_sglang.server.gate import Refused, gate_of

    if not _applies(manager):
        return await original(manager, obj, request)
    gate = gate_of(manager)
    tags = _tags(obj)
    async with gate.exclusive(_wants_wait(request)):
        if not await settle(manager):
            raise Refused(409, "Requests are in progress: abort them or wait before releasing memory.")
        gate.sleeping |= tags
        return await original(manager, obj, request)


async def resume_memory(original: Callable[..., Awaitable[Any]], manager, obj, request=None):
    """Around `resume_memory_occupation`: awake again once everything is back."""
    from s3r_sglang.server.gate import gate_of

    if not _applies(manager):
        return await original(manager, obj, request)
    tags = _tags(obj)
    result = await original(manager, obj, request)
    gate_of(manager).sleeping -= tags
    return result


async def settle(manager) -> bool:
    """Wait until the scheduler is idle, and drop its prefix cache; False if requests are in progress.

    The last response is out before the scheduler has dropped its last batch, and under overlap scheduling one
    more round is in flight. An update or release that arrives just then fails an assertion and ends the server.
    """
    if manager.rid_to_state:
        return False
    return (await manager.flush_cache(timeout_s=IDLE_SECONDS)).success


def _tags(obj) -> set[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    from s3r_sglang.server.gate import Refused

    tags = set(obj.tags or GPU_MEMORY_ALL_TYPES)
    if unknown := tags - set(GPU_MEMORY_ALL_TYPES):
        raise Refused(400, f"Unknown tags {sorted(unknown)}; known are {', '.join(GPU_MEMORY_ALL_TYPES)}.")
    return tags
