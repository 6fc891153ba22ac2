"""The request table holds what SGLang reserves for requests at the context limit."""

import pytest


@pytest.mark.parametrize("draft_length", [1, 6, 7, 8, 32])
def test_the_request_table_covers_the_reserve_at_the_context_limit(make_args, draft_length):
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    args = make_args(speculative_num_steps=draft_length)
    columns_beyond_context = kv_cache_configurator.get_req_to_token_extra_context_len(args)
    # Responses end 2 tokens before the context length (Scheduler.init_req_max_new_tokens); one that has not
    # ended is shorter by 1, and its last token has no KV.
    last_committed = -4
    assert last_committed + get_alloc_reserve_per_decode(args) <= columns_beyond_context


def test_other_algorithms_keep_their_table(make_args):
    from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len

    assert get_req_to_token_extra_context_len(make_args(speculative_algorithm=None)) == 4
