"""Verify metadata for warm-up and CUDA graph capture, which SGLang builds for its own algorithms by name."""

from typing import Any


def captured_verify_input(original, runner, num_tokens: int):
    """Around `DecodeCudaGraphRunner.get_spec_info`: FlashInfer plans a captured verification from it."""
    chain = _chain(runner.model_runner.spec_algorithm, runner.captured_req_width)
    return original(runner, num_tokens) if chain is None else chain


def chain_verify_input(
    original, spec_algorithm, server_args, custom_mask, num_tokens_per_req: int, is_draft_worker: bool
):
    """Around `create_dummy_verify_input`, which is for warm-up."""
    chain = _chain(spec_algorithm, num_tokens_per_req)
    if chain is not None:
        return chain
    return original(spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker)


def _chain(spec_algorithm: Any, num_tokens: int) -> Any:
    """A chain of `num_tokens` tokens per request under the causal mask; None for other algorithms."""
    from s3r_sglang.algorithm import S3RAlgorithm

    if not isinstance(spec_algorithm, S3RAlgorithm):
        return None

    from s3r_sglang.types import S3RVerifyInput

    return S3RVerifyInput(draft_token=None, positions=None, draft_token_num=num_tokens)
