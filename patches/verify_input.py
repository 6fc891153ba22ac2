"""Verify metadata for warm-up and CUDA graph capture, which SGLang builds for its own algorithms by name."""


def captured_verify_input(original, runner, num_tokens: int):
    """Around `DecodeCudaGraphRunner.get_spec_info`: FlashInfer plans a captured verification from it."""
    from s3r_sglang.algorithm import S3RAlgorithm

    if not isinstance(runner.model_runner.spec_algorithm, S3RAlgorithm):
        return original(runner, num_tokens)

    from s3r_sglang.types import S3RVerifyInput

    return S3RVerifyInput(draft_token=None, positions=None, draft_token_num=runner.captured_req_width)


def chain_verify_input(
    original, spec_algorithm, server_args, custom_mask, num_tokens_per_req: int, is_draft_worker: bool
):
    """Around `create_dummy_verify_input`, for warm-up: a chain under the causal mask."""
    from s3r_sglang.algorithm import S3RAlgorithm

    if not isinstance(spec_algorithm, S3RAlgorithm):
        return original(spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker)

    from s3r_sglang.types import S3RVerifyInput

    return S3RVerifyInput(draft_token=None, positions=None, draft_token_num=num_tokens_per_req)
