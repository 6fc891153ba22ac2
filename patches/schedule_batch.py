"""Where a response ends inside a block, and how much of a prompt the prefix cache may serve."""


def first_end_of_a_block(original, req, new_accepted_len: int = 1) -> None:
    """Around `Req.update_finish_state`: what autoregressive decoding would have met first ends the response.

    SGLang looks at all new tokens at once and in a fixed order: length, then stop strings in the order of the
    request, then stop tokens. So a stop token in the block that also reaches `max_new_tokens` is passed over,
    and the response goes on behind it. Once a block is known to hold an end, its tokens are looked at again one
    by one; that happens once per request, so it costs nothing.
    """
    if req.finished() or new_accepted_len == 1:
        original(req, new_accepted_len)
        return
    aborted = req.to_finish is not None
    original(req, new_accepted_len)
    if aborted or not req.finished():
        return
    tokens = req.output_ids
    for length in range(len(tokens) - new_accepted_len + 1, len(tokens) + 1):
        req.finished_reason = req.finished_len = None
        req.output_ids = tokens[:length]
        original(req, 1)
        if req.finished():
            req.finished_len = length
            break
    req.output_ids = tokens


def leave_the_prompts_last_queries(max_prefix_len: int, req, input_len: int) -> int:
    """After `Req._compute_max_prefix_len`: prefill the last `prompt_queries` tokens whatever the cache holds.

    Their queries select the request's first index. SGLang would prefill a single token after a full hit, as
    every request of a group but the first has: the index would come from one query, and, because it steers
    the drafts, a seed would give another response than after a miss.
    """
    from sglang.srt.runtime_context import get_server_args

    from s3r_sglang.config import is_self_sparse

    server_args = get_server_args()
    if not is_self_sparse(server_args.speculative_algorithm):
        return max_prefix_len
    return max(0, min(max_prefix_len, input_len - server_args.s3r_prompt_queries))
