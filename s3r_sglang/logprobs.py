"""Log-probabilities of the emitted tokens: the dense policy's, at the rollout temperature."""

from __future__ import annotations

import torch

from s3r_sglang.sampling import SamplingParams
from s3r_sglang.sglang_symbols import LogitsProcessorOutput, OutputLogprobProcessor, ScheduleBatch, envs


def output_logprobs(
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    tokens: torch.Tensor,
    params: SamplingParams,
) -> None:
    """Fill the logprob fields of SGLang's logits output, as its sampler and its result processor expect them.

    The reported policy is softmax((logits + bias) / T), before top-k, top-p and min-p, like SGLang's own.

    Args:
        batch: gives the requested numbers of top logprobs and token ids.
        logits_output: `next_token_logits` of shape [B * n, V].
        tokens: [B] after a prefill (n = 1), [B, k + 1] after a round; columns past the accepted ones are ignored
            by SGLang.
        params: sampling parameters of the B requests.
    """
    rows = tokens.numel() // tokens.shape[0]
    logits = logits_output.next_token_logits.float().view(tokens.shape[0], rows, -1)
    if params.logit_bias is not None:
        logits = logits + params.logit_bias[:, None]
    if not envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get():
        logits = logits / params.temperatures.view(-1, 1, 1)
    result = OutputLogprobProcessor().compute_logprobs(
        torch.log_softmax(logits, dim=-1).flatten(0, 1),
        [n for n in batch.top_logprobs_nums for _ in range(rows)],
        [ids for ids in batch.token_ids_logprobs for _ in range(rows)],
        tokens.flatten().long(),
    )
    result.write_output_to(logits_output)
    logits_output.next_token_logprobs = result.token_logprobs.view(tokens.shape)
