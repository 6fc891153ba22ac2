"""Logprobs of emitted tokens: those of the policy, by the short way and by SGLang's."""

from types import SimpleNamespace

import pytest
import torch

B, ROWS, V = 5, 3, 40


def report(logits, tokens, params, top):
    from s3r_sglang.logprobs import output_logprobs
    from s3r_sglang.sglang_symbols import LogitsProcessorOutput

    batch = SimpleNamespace(top_logprobs_nums=[top] * B, token_ids_logprobs=[None] * B)
    output = LogitsProcessorOutput(next_token_logits=logits)
    output_logprobs(batch, output, tokens, params)
    return output.next_token_logprobs


@pytest.mark.parametrize("rows", [1, ROWS], ids=["prefill", "round"])
@pytest.mark.parametrize("top", [0, 2], ids=["tokens", "top"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [1, 2 * ROWS * V, 1 << 24])
def test_logprobs_are_the_policys_at_its_temperature(monkeypatch, rows, top, biased, chunk):
    from s3r_sglang import logprobs
    from s3r_sglang.sampling import SamplingParams

    monkeypatch.setattr(logprobs, "_CHUNK", chunk)
    generator = torch.Generator().manual_seed(rows)
    logits = 3 * torch.randn(B * rows, V, generator=generator)
    untouched = logits.clone()
    tokens = torch.randint(V, (B,) if rows == 1 else (B, rows), generator=generator, dtype=torch.int32)
    bias = torch.randn(B, V, generator=generator) if biased else None
    temperatures = torch.tensor([0.3, 0.7, 1.0, 1.5, 4.0])
    params = SamplingParams(
        temperatures=temperatures[:, None],
        top_ks=torch.full((B,), 5),
        top_ps=torch.ones(B),
        min_ps=torch.zeros(B),
        logit_bias=bias,
    )
    exact = logits.double().view(B, rows, V) + (0 if bias is None else bias.double()[:, None])
    exact = torch.log_softmax(exact / temperatures.double()[:, None, None], dim=-1)
    expected = exact.gather(-1, tokens.view(B, rows, 1).long()).view(tokens.shape)
    torch.testing.assert_close(report(logits, tokens, params, top).double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(logits, untouched)


def test_an_impossible_token_has_a_finite_logprob():
    from s3r_sglang.sampling import SamplingParams

    logits = torch.zeros(B, V)
    logits[:, 0] = -torch.inf
    ones = torch.ones(B)
    params = SamplingParams(ones, torch.full((B,), V), ones, 0 * ones)
    lowest = torch.finfo(torch.float32).min
    assert report(logits, torch.zeros(B, dtype=torch.int32), params, top=0).tolist() == [lowest] * B


@pytest.mark.parametrize("rows", [1, ROWS], ids=["prefill", "round"])
def test_requests_that_name_tokens_run_beside_others(rows):
    """SGLang converts what each row reports; of one that names no tokens it makes a list, which fails there."""
    from s3r_sglang.logprobs import output_logprobs
    from s3r_sglang.sampling import SamplingParams
    from s3r_sglang.sglang_symbols import LogitsProcessorOutput

    logits = torch.randn(B * rows, V, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(B)
    params = SamplingParams(ones, torch.full((B,), V), ones, 0 * ones)
    named = [None, [3, 5], None, [], [7]]
    batch = SimpleNamespace(top_logprobs_nums=[0] * B, token_ids_logprobs=named)
    output = LogitsProcessorOutput(next_token_logits=logits)
    output_logprobs(batch, output, torch.zeros(B, rows, dtype=torch.int32), params)
    expected = torch.log_softmax(logits, dim=-1)
    reported = [values.tolist() for values in output.next_token_token_ids_logprobs_val]
    for row, (values, line) in enumerate(zip(reported, expected, strict=True)):
        assert values == pytest.approx([line[token].item() for token in named[row // rows] or []])


@pytest.mark.parametrize("top", [0, V], ids=["tokens", "top"])
def test_mode_direct_reports_what_was_sampled_from(top):
    from s3r_sglang.logprobs import sparse_logprobs
    from s3r_sglang.sampling import keep_drafts
    from s3r_sglang.sglang_symbols import LogitsProcessorOutput

    generator = torch.Generator().manual_seed(0)
    q = torch.softmax(3 * torch.randn(B, ROWS, V, generator=generator), -1)
    q[:, :, :7] = 0  # filtered
    q /= q.sum(-1, keepdim=True)
    drafts = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(B, ROWS)
    tokens, accept_lens = keep_drafts(drafts)
    assert (tokens.shape, tokens.dtype, accept_lens.dtype) == ((B, ROWS + 1), torch.int32, torch.int32)
    assert torch.equal(tokens[:, :ROWS].long(), drafts)
    assert accept_lens.tolist() == [ROWS] * B
    batch = SimpleNamespace(top_logprobs_nums=[top] * B, token_ids_logprobs=[None] * B)
    output = LogitsProcessorOutput(next_token_logits=None)
    untouched = q.clone()
    sparse_logprobs(batch, output, tokens, q)
    expected = q.gather(-1, drafts[..., None]).squeeze(-1).log()
    assert output.next_token_logprobs.shape == tokens.shape
    torch.testing.assert_close(output.next_token_logprobs[:, :ROWS], expected)
    assert output.next_token_logprobs.isfinite().all()
    assert torch.equal(q, untouched)
