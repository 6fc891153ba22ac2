"""Columns of the request table for the KV rows that SGLang reserves ahead of a round."""


def cover_the_reserve(extra: int, server_args) -> int:
    """After `get_req_to_token_extra_context_len`: at least the reserve, beyond the context length.

    A decode step reserves rows for 2 (k + 1) positions after the committed ones, which reach up to 4 positions
    before the context length; SGLang leaves 4 + (k + 1) columns. From k = 8 on, a request at the context limit
    would write its last row numbers over the first of the next slot, and that request then read and write
    its KV there.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    from s3r_sglang.config import is_self_sparse

    if not is_self_sparse(server_args.speculative_algorithm):
        return extra
    return max(extra, get_alloc_reserve_per_decode(server_args))
