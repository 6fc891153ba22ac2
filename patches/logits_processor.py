"""Logits stay in the model's type: SGLang copies them to float32, our sampling kernels convert as they read."""


def keep_dtype(original, self, logits, logits_metadata, use_buffer: bool = True):
    """Around `LogitsProcessor._copy_logits_to_buffer`, for the draft and the verify forward of our worker.

    Verification still copies to SGLang's buffer, half of which then suffices: CUDA graphs of all batch sizes
    share it. A soft cap is applied to float32 logits, as upstream. The copies took 0.36 ms a round at 64
    requests with a vocabulary of 152K on an H200.
    """
    mode = logits_metadata.forward_mode
    if self.final_logit_softcapping or not (mode.is_decode() or mode.is_target_verify()) or not _is_ours():
        return original(self, logits, logits_metadata, use_buffer)
    logits = logits[:, : self.vocab_size]
    buffer = logits_metadata.next_token_logits_buffer if use_buffer else None
    if buffer is None or buffer.shape != logits.shape:
        return logits
    return buffer.flatten().view(logits.dtype)[: logits.numel()].view(logits.shape).copy_(logits)


def _is_ours() -> bool:
    from sglang.srt.runtime_context import get_context

    from s3r_sglang.algorithm import NAMES

    return get_context().server_args.speculative_algorithm in NAMES
