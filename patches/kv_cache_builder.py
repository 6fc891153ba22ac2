"""No draft KV pool: the draft's KV lives in the target's pool, at positions that verification overwrites."""


def no_draft_kv_pool(original, *, draft_worker, spec_algorithm, server_args):
    """Around `get_draft_kv_pool`, which otherwise takes the pool of a draft runner that we do not have."""
    from s3r_sglang.algorithm import S3RAlgorithm

    if isinstance(spec_algorithm, S3RAlgorithm):
        return None
    return original(draft_worker=draft_worker, spec_algorithm=spec_algorithm, server_args=server_args)
