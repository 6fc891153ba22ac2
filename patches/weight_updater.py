"""Weight updates, sleep and wake, in the scheduler process: what would kill it, or leave old KV behind."""

from s3r_sglang.config import serves_rollouts


def _applies(updater) -> bool:
    return serves_rollouts(updater.tp_worker.model_runner.server_args)


def flush_with_every_update(original, updater, recv_req) -> None:
    """Around `flush_cache_after_weight_update`: prefix KV and draft index belong to the weights that made them.

    Trainers pass flush_cache=False for all buckets but the last; should the last one get lost, responses to
    cached prompts would mix two policies.
    """
    if _applies(updater) and updater.is_fully_idle():
        updater.flush_cache(empty_cache=recv_req.torch_empty_cache)
    else:
        original(updater, recv_req)


def release_once(original, updater, recv_req):
    """Around `release_memory_occupation`: what is released already is left alone."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    pending = [tag for tag in _tags(recv_req) if tag not in updater.offload_tags]
    if not _applies(updater):
        return original(updater, recv_req)
    if not pending:
        return ReleaseMemoryOccupationReqOutput()
    recv_req.tags = pending
    return original(updater, recv_req)


def resume_once(original, updater, recv_req):
    """Around `resume_memory_occupation`, which raises, and ends the server, on what was not released.

    The request table lies in the region of the KV cache, so it comes back undefined. Requests write their rows
    before they read them; only row 0 is read as it is, by the padding of the draft's graphs, which would then
    write KV at any row of the pool.
    """
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    pending = [tag for tag in _tags(recv_req) if tag in updater.offload_tags]
    if not _applies(updater):
        return original(updater, recv_req)
    if not pending:
        return ResumeMemoryOccupationReqOutput()
    recv_req.tags = pending
    output = original(updater, recv_req)
    if GPU_MEMORY_TYPE_KV_CACHE in pending:
        updater.scheduler.req_to_token_pool.req_to_token[0].zero_()
    return output


def _tags(recv_req) -> list[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return list(recv_req.tags or GPU_MEMORY_ALL_TYPES)
