"""Requests on their way in and out, in the main process: refusals, seeds of parallel samples, `meta_info`."""

import copy

from s3r_sglang.config import config_of, is_self_sparse


def check_request(original, manager, obj, *args, **kwargs):
    """Around `_create_tokenized_object`, after which the sampling parameters are final; nothing has been sent.

    The request holds SGLang's reader lock by now, so no update and no release can come in between.
    """
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    from s3r_sglang.requests import refuse_fatal, refuse_inexact, refuse_unknown
    from s3r_sglang.server.gate import gate_of

    if not is_self_sparse(manager.server_args.speculative_algorithm):
        return original(manager, obj, *args, **kwargs)
    refuse_unknown(obj.sampling_params)
    tokenized = original(manager, obj, *args, **kwargs)
    if isinstance(tokenized, TokenizedGenerateReqInput):
        refuse_inexact(tokenized)
        refuse_fatal(tokenized, manager.model_config.vocab_size)
        gate_of(manager).refuse_generation()
    return tokenized


def seed_parallel_sample(manager, tokenized):
    """Before `_send_one_request`: give each sample of a request with n > 1 and a seed one of its own.

    SGLang sends the same parameters n times, so all samples would be equal. The child that only fills the
    prefix cache (max_new_tokens = 0) samples nothing and is not counted.
    """
    from s3r_sglang.requests import seed_of_sample

    parent = manager.child_rid_to_logical_rid.get(tokenized.rid)
    params = tokenized.sampling_params
    if (
        parent is None
        or not is_self_sparse(manager.server_args.speculative_algorithm)
        or params.sampling_seed is None
        or params.max_new_tokens == 0
    ):
        return None
    state = manager.rid_to_state[parent]
    sample = getattr(state, "s3r_num_samples", 0)
    state.s3r_num_samples = sample + 1
    seeded = copy.copy(tokenized)
    seeded.sampling_params = copy.copy(params)
    seeded.sampling_params.sampling_seed = seed_of_sample(params.sampling_seed, sample)
    return (manager, seeded), {}


def add_meta_info(_, manager, meta_info, recv_obj, i) -> None:
    """After `_calculate_spec_decoding_metrics`, which SGLang calls once per finished request."""
    from s3r_sglang.metrics import request_metrics

    if is_self_sparse(manager.server_args.speculative_algorithm):
        # Absent if no round was needed.
        histogram = meta_info.get("spec_accept_histogram", [])
        context = recv_obj.prompt_tokens[i] + recv_obj.completion_tokens[i]
        config = config_of(manager.server_args)
        meta_info.update(request_metrics(config, histogram, context))
        if not config.faithful:
            # SGLang took the block for drafts that were verified.
            for name in [name for name in meta_info if name.startswith("spec_")]:
                del meta_info[name]
