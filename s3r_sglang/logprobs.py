"""Log-probabilities of the emitted tokens: the dense policy's, at the rollout temperature; in mode direct q's."""

from __future__ import annotations

import torch

from s3r_sglang.sampling import SamplingParams
from s3r_sglang.sglang_symbols import LogitsProcessorOutput, OutputLogprobProcessor, ScheduleBatch, envs

# Logits at a time: 67 MB for each fp32 temporary, where B = 256, k = 6 and V = 151,936 make 1.1 GB at once.
_CHUNK = 1 << 24


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
    batch_size = tokens.shape[0]
    rows = tokens.numel() // batch_size
    logits = logits_output.next_token_logits.view(batch_size, rows, -1)
    if not any(batch.top_logprobs_nums) and all(ids is None for ids in batch.token_ids_logprobs):
        logprobs = _token_logprobs(logits, tokens.view(batch_size, rows).long(), params)
        logits_output.next_token_logprobs = logprobs.view(tokens.shape)
        return
    scaled = _scaled(logits, params, slice(None))
    _report(batch, logits_output, tokens, torch.log_softmax(scaled, dim=-1))


def sparse_logprobs(
    batch: ScheduleBatch, logits_output: LogitsProcessorOutput, tokens: torch.Tensor, q: torch.Tensor
) -> None:
    """The same for responses sampled straight from the sparse policy: log q, filters and greedy choice included.

    Args:
        tokens: [B, k + 1], see `s3r_sglang.sampling.keep_drafts`.
        q: [B, k, V] fp32, what the first k tokens were sampled from.
    """
    # A row for the column that SGLang ignores.
    _report(batch, logits_output, tokens, torch.nn.functional.pad(q, (0, 0, 0, 1)).log_())


def _report(
    batch: ScheduleBatch, logits_output: LogitsProcessorOutput, tokens: torch.Tensor, logprobs: torch.Tensor
) -> None:
    """Hand over `logprobs` [B, n, V], with the top and the named tokens that requests ask for."""
    rows = logprobs.shape[1]
    result = OutputLogprobProcessor().compute_logprobs(
        logprobs.flatten(0, 1),
        [n for n in batch.top_logprobs_nums for _ in range(rows)],
        [ids for ids in batch.token_ids_logprobs for _ in range(rows)],
        tokens.flatten().long(),
    )
    if result.token_ids_logprobs_val is not None:
        # SGLang has a list for those that name none, and ends the process when it converts it.
        none = logprobs.new_empty(0)
        result.token_ids_logprobs_val = [
            none if isinstance(values, list) else values for values in result.token_ids_logprobs_val
        ]
    result.write_output_to(logits_output)
    logits_output.next_token_logprobs = result.token_logprobs.view(tokens.shape)


def _token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logprobs [B, n] fp32 of `tokens` [B, n] under `logits` [B, n, V], without those of all other tokens."""
    logprobs = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
    step = max(1, _CHUNK // logits.shape[1:].numel())
    for begin in range(0, len(tokens), step):
        part = slice(begin, begin + step)
        scaled = _scaled(logits, params, part)
        chosen = scaled.gather(-1, tokens[part, :, None]).squeeze(-1)
        logprobs[part] = chosen - scaled.logsumexp(dim=-1)
    # As SGLang does: JSON has no infinity.
    return logprobs.clamp_(min=torch.finfo(torch.float32).min)


def _scaled(logits: torch.Tensor, params: SamplingParams, part: slice) -> torch.Tensor:
    """(logits + bias) / T in fp32 of the requests in `part`."""
    scaled = logits[part].float()
    if params.logit_bias is not None:
        scaled = scaled + params.logit_bias[part, None]
    if not envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get():
        scaled = scaled / params.temperatures.view(-1, 1, 1)[part]
    return scaled
