import pytest
import torch
from s3r_sglang.kernels.ops import attention_scores as op_module
from s3r_sglang.kernels.reference import attention_scores as reference_module

IMPLEMENTATIONS = [op_module.attention_scores, reference_module.attention_scores]
implementations = pytest.mark.parametrize("score", IMPLEMENTATIONS, ids=["op", "reference"])
UNTOUCHED = -7.0


def expected(batch, num_queries, num_candidates, width):
    """The rule in float64, one query at a time: a causal softmax each, then their mean."""
    out = torch.full(
        (len(num_queries), batch.num_kv_heads, width), UNTOUCHED, dtype=torch.float64, device=batch.q.device
    )
    for b, (counted, candidates) in enumerate(zip(num_queries, num_candidates, strict=True)):
        logits = batch.logits(b)
        queries, seq_len = logits.shape[2:]
        weights = torch.zeros_like(logits)
        for i in range(queries - counted, queries):
            seen = seq_len - queries + i + 1
            weights[:, :, i, :seen] = logits[:, :, i, :seen].softmax(-1)
        mean = weights.mean(dim=1).sum(dim=1) / max(counted, 1)
        out[b, :, :candidates] = mean[:, :candidates]
    return out


def call(score, batch, num_queries, num_candidates, width, **kwargs):
    device = batch.q.device
    out = torch.full((len(num_queries), batch.num_kv_heads, width), UNTOUCHED, device=device)
    result = score(
        batch.q, batch.k_cache, batch.req_to_token, batch.req_pool_indices, batch.seq_lens,
        torch.tensor(num_queries, device=device), torch.tensor(num_candidates, device=device),
        batch.scale, out, **kwargs,
    )  # fmt: skip
    assert result is out
    return out


@implementations
def test_equals_mean_causal_softmax(score, heads, make_batch, tolerance):
    batch = make_batch([70, 9, 33], 7, **heads)
    arguments = {"num_queries": [7, 7, 3], "num_candidates": [66, 1, 33], "width": 75}
    got = call(score, batch, **arguments)
    torch.testing.assert_close(got.double(), expected(batch, **arguments), **tolerance(torch.float32))


@implementations
def test_each_query_spreads_a_weight_of_one(score, make_batch):
    batch = make_batch([40, 21], num_queries=5, group=3)
    got = call(score, batch, num_queries=[5, 2], num_candidates=[40, 21], width=40)
    sums = torch.stack([got[0].sum(-1), got[1, :, :21].sum(-1)])
    torch.testing.assert_close(sums, torch.ones_like(sums))


@implementations
def test_rows_without_queries_or_positions_are_harmless(score, make_batch):
    batch = make_batch([20, 0, 12], num_queries=4)
    got = call(score, batch, num_queries=[4, 0, 0], num_candidates=[18, 0, 10], width=20)
    assert (got[0, :, 18:] == UNTOUCHED).all()
    assert (got[1] == UNTOUCHED).all()
    assert (got[2, :, :10] == 0).all()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_any_split_and_many_rows(num_splits, make_batch, tolerance):
    # 40 queries of a group of 4 are 160 rows: three blocks of rows.
    batch = make_batch([60, 44], num_queries=40, num_kv_heads=1, group=4, head_dim=48)
    num_queries, num_candidates = [40, 33], [55, 44]
    out = torch.full((2, 1, 60), UNTOUCHED, device=batch.q.device)
    op_module._launch_kernels(
        batch.q, batch.k_cache, batch.req_to_token, batch.req_pool_indices, batch.seq_lens,
        torch.tensor(num_queries, device=out.device), torch.tensor(num_candidates, device=out.device),
        batch.scale, out, None, block_n=16, num_splits=num_splits,
    )  # fmt: skip
    want = expected(batch, num_queries, num_candidates, 60)
    torch.testing.assert_close(out.double(), want, **tolerance(torch.float32))


def test_a_given_lse_replaces_the_first_pass(make_batch, tolerance):
    batch = make_batch([50], num_queries=3)
    logits = batch.logits(0)
    query_position = torch.arange(47, 50, device=logits.device)
    unseen = torch.arange(50, device=logits.device) > query_position[:, None]
    lse = logits.masked_fill(unseen, -torch.inf).logsumexp(-1)  # [Hkv, G, Q]
    lse = lse.flatten(0, 1).T[None].float()  # [1, Q, Hq], not contiguous
    arguments = {"num_queries": [3], "num_candidates": [48], "width": 50}
    got = call(op_module.attention_scores, batch, **arguments, lse=lse)
    torch.testing.assert_close(got.double(), expected(batch, **arguments), **tolerance(torch.float32))
    shifted = call(op_module.attention_scores, batch, **arguments, lse=lse + 1)
    torch.testing.assert_close(shifted[..., :48], got[..., :48] * torch.tensor(-1.0).exp().item())


@pytest.mark.gpu
def test_a_graph_follows_new_lengths(capture, make_batch, tolerance):
    batch = make_batch([700, 90], 7, 2, 4, 128, torch.bfloat16)
    lengths = batch.seq_lens.clone()
    counts = [torch.zeros_like(lengths), torch.zeros_like(lengths)]
    batch.seq_lens.zero_()
    out = torch.full((2, 2, 700), UNTOUCHED, device=batch.q.device)
    arguments = (batch.q, batch.k_cache, batch.req_to_token, batch.req_pool_indices, batch.seq_lens)
    replay = capture(lambda: op_module.attention_scores(*arguments, *counts, batch.scale, out))
    batch.seq_lens.copy_(lengths)
    counts[0].copy_(torch.tensor([7, 3]))
    counts[1].copy_(torch.tensor([650, 90]))
    replay()
    want = expected(batch, [7, 3], [650, 90], 700)
    torch.testing.assert_close(out.double(), want, **tolerance(torch.float32))


def test_rejects_a_wrong_output(make_batch):
    batch = make_batch([20], num_queries=2)
    counts = torch.tensor([2], device=batch.q.device)
    with pytest.raises(ValueError, match=r"out must be torch\.float32"):
        op_module.attention_scores(
            batch.q, batch.k_cache, batch.req_to_token, batch.req_pool_indices, batch.seq_lens,
            counts, counts, batch.scale, torch.empty(1, 2, 20, dtype=torch.float16, device=batch.q.device),
        )  # fmt: skip
