"""Verify metadata for warm-up and CUDA graph capture, which SGLang builds for its own algorithms by name."""


def chain_verify_input(
    original, spec_algorithm, server_args, custom_mask, num_tokens_per_req: int, is_draft_worker: bool
):
    """Around `create_dummy_verify_input`: a chain of `num_tokens_per_req` tokens under the causal mask."""
    from s3r_sglang.algorithm import S3RAlgorithm

    if not isinstance(spec_algorithm, S3RAlgorithm):
        return original(spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker)

    from s3r_sglang.types import S3RVerifyInput

    return S3RVerifyInput(draft_token=None, positions=None, draft_token_num=num_tokens_per_req)
