import pytest
import torch
from s3r_sglang.kernels.ops import verify_attention as op_module
from s3r_sglang.kernels.reference import attention_scores as scores_module
from s3r_sglang.kernels.reference import verify_attention as reference_module

IMPLEMENTATIONS = [op_module.verify_attention, reference_module.verify_attention]
implementations = pytest.mark.parametrize("attend", IMPLEMENTATIONS, ids=["op", "reference"])
UNTOUCHED = -7.0


def causal_logits(batch, b):
    """Float64 logits [Hkv, G, Q, seq_len], -inf where a query stands before the position."""
    logits = batch.logits(b)
    queries, seq_len = logits.shape[2:]
    query_position = torch.arange(seq_len - queries, seq_len, device=logits.device)
    return logits.masked_fill(
        torch.arange(seq_len, device=logits.device) > query_position[:, None], -torch.inf
    )


def expected(batch):
    """Float64 (out [B, Q, Hq, D], lse [B, Q, Hq]); a query at a negative position gives 0."""
    outs, lses = [], []
    for b in range(len(batch.seq_lens)):
        logits = causal_logits(batch, b)
        attended = torch.einsum("hgqn,nhd->qhgd", logits.softmax(-1).nan_to_num(0), batch.values(b))
        outs.append(attended.flatten(1, 2))
        lses.append(logits.logsumexp(-1).flatten(0, 1).T)
    return torch.stack(outs), torch.stack(lses)


def call(attend, batch, **kwargs):
    return attend(
        batch.q, batch.k_cache, batch.v_cache, batch.req_to_token, batch.req_pool_indices, batch.seq_lens,
        batch.scale, **kwargs,
    )  # fmt: skip


@implementations
def test_equals_causal_softmax(attend, heads, make_batch, tolerance):
    batch = make_batch([70, 7, 33], 7, **heads)
    out = call(attend, batch)
    assert out.dtype == heads["dtype"]
    torch.testing.assert_close(out.double(), expected(batch)[0], **tolerance(heads["dtype"]))


@implementations
def test_scores_of_the_exact_lse_are_attention_scores(attend, make_batch, tolerance):
    batch = make_batch([70, 9], num_queries=7, group=3)
    want_out, lse = expected(batch)
    candidates = torch.tensor([64, 3], device=lse.device)
    scores = torch.full((2, 2, 80), UNTOUCHED, device=lse.device)
    out = call(attend, batch, lse_estimate=lse.float(), num_candidates=candidates, scores=scores)
    want = torch.full_like(scores, UNTOUCHED)
    scores_module.attention_scores(
        batch.q, batch.k_cache, batch.req_to_token, batch.req_pool_indices, batch.seq_lens,
        torch.tensor([7, 7], device=lse.device), candidates, batch.scale, want,
    )  # fmt: skip
    torch.testing.assert_close(scores, want, **tolerance(torch.float32))
    torch.testing.assert_close(out.double(), want_out, **tolerance(torch.float32))


@implementations
def test_scores_of_an_estimate_average_the_counted_rows(attend, make_batch, tolerance):
    batch = make_batch([40], num_queries=3, num_kv_heads=2, group=2)
    estimate = expected(batch)[1] + torch.randn(1, 3, 4, dtype=torch.float64).to(batch.q.device)
    estimate[0, 1] = -torch.inf  # a query that does not count
    estimate[0, 2, 3] = -torch.inf  # and one head of another
    scores = torch.full((1, 2, 40), UNTOUCHED, device=batch.q.device)
    call(
        attend, batch, lse_estimate=estimate.float(), scores=scores,
        num_candidates=torch.tensor([36], device=batch.q.device),
    )  # fmt: skip
    grouped = estimate[0].T.unflatten(0, (2, 2))  # [Hkv, G, Q]
    weights = (causal_logits(batch, 0) - grouped[..., None]).exp()  # +inf in rows that do not count
    counted = grouped > -torch.inf
    want = torch.where(counted[..., None], weights, 0).sum((1, 2)) / counted.sum((1, 2))[:, None]
    torch.testing.assert_close(scores[0, :, :36].double(), want[:, :36], **tolerance(torch.float32))
    assert (scores[0, :, 36:] == UNTOUCHED).all()


@pytest.mark.parametrize(("num_splits", "block_n"), [(1, 16), (2, 32), (5, 16)])
def test_any_split_gives_the_same_result(num_splits, block_n, make_batch, tolerance):
    batch = make_batch([100, 8], num_queries=7, group=3, head_dim=48)
    want_out, lse = expected(batch)
    out = torch.full_like(batch.q, torch.nan)
    scores = torch.full((2, 2, 100), UNTOUCHED, device=out.device)
    op_module._launch_kernels(
        batch.q, batch.k_cache, batch.v_cache, batch.req_to_token, batch.req_pool_indices, batch.seq_lens,
        batch.scale, lse.float(), torch.tensor([94, 2], device=out.device), scores, out,
        block_n=block_n, num_splits=num_splits,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), want_out, **tolerance(torch.float32))
    want = (causal_logits(batch, 0) - lse[0].T.unflatten(0, (2, 3))[..., None]).exp().mean((1, 2))
    torch.testing.assert_close(scores[0, :, :94].double(), want[:, :94], **tolerance(torch.float32))
    assert (scores[1, :, 2:] == UNTOUCHED).all()


@pytest.mark.parametrize("growth", [0.1, 0.4, -0.4, 30.0])
def test_logits_that_grow_or_fall_with_the_position(growth, make_batch, tolerance):
    """The running maximum is followed late, in leaps, or never again after the first of seven tiles."""
    batch = make_batch([110], num_queries=3, group=3)
    slot = batch.req_pool_indices[0]
    rows = batch.req_to_token[slot, :110].long()
    batch.q.abs_()
    batch.k_cache[rows] = 0.05 * batch.k_cache[rows]
    batch.k_cache[rows] += growth * torch.arange(110.0, device=batch.q.device)[:, None, None] / 4
    want_out, lse = expected(batch)
    scores = torch.zeros(1, 2, 110, device=batch.q.device)
    out = torch.empty_like(batch.q)
    op_module._launch_kernels(
        batch.q, batch.k_cache, batch.v_cache, batch.req_to_token, batch.req_pool_indices, batch.seq_lens,
        batch.scale, lse.float(), batch.seq_lens, scores, out, block_n=16, num_splits=1,
    )  # fmt: skip
    # Float32 logits of a few thousand are exact to 1e-4.
    torch.testing.assert_close(out.double(), want_out, rtol=2e-3, atol=2e-4)
    want = (causal_logits(batch, 0) - lse[0].T.unflatten(0, (2, 3))[..., None]).exp().mean((1, 2))
    torch.testing.assert_close(scores[0].double(), want, rtol=2e-3, atol=2e-4)


@implementations
def test_queries_at_negative_positions_get_zero(attend, make_batch, tolerance):
    batch = make_batch([30, 0, 2], num_queries=4)
    scores = torch.full((3, 2, 30), UNTOUCHED, device=batch.q.device)
    estimate = torch.zeros(3, 4, 4, device=batch.q.device)
    candidates = torch.tensor([10, 0, 0], device=batch.q.device)
    out = call(attend, batch, lse_estimate=estimate, num_candidates=candidates, scores=scores)
    torch.testing.assert_close(out.double(), expected(batch)[0], **tolerance(torch.float32))
    assert (out[1] == 0).all()
    assert (out[2, :2] == 0).all()
    assert (scores[1:] == UNTOUCHED).all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_graph_follows_new_lengths(num_splits, capture, make_batch, tolerance, monkeypatch):
    monkeypatch.setattr(op_module._launch, "even_splits", lambda *args, **kwargs: num_splits)
    batch = make_batch([700, 90], 7, 2, 4, 128, torch.bfloat16)
    want_out, lse = expected(batch)
    lengths, estimate = batch.seq_lens.clone(), lse.float()
    batch.seq_lens.zero_()
    candidates = torch.zeros_like(lengths)
    out, scores = torch.empty_like(batch.q), torch.zeros(2, 2, 700, device=batch.q.device)
    kwargs = {"lse_estimate": estimate, "num_candidates": candidates, "scores": scores, "out": out}
    replay = capture(lambda: call(op_module.verify_attention, batch, **kwargs))
    batch.seq_lens.copy_(lengths)
    candidates.copy_(torch.tensor([650, 80]))
    replay()
    torch.testing.assert_close(out.double(), want_out, **tolerance(torch.bfloat16))
    want = (causal_logits(batch, 0) - lse[0].T.unflatten(0, (2, 4))[..., None]).exp().mean((1, 2))
    torch.testing.assert_close(scores[0, :, :650].double(), want[:, :650], **tolerance(torch.float32))


def test_refuses_more_rows_than_a_tile(make_batch):
    with pytest.raises(ValueError, match="132 rows do not fit one tile"):
        call(op_module.verify_attention, make_batch([40], num_queries=33, num_kv_heads=1, group=4))


@implementations
def test_score_arguments_go_together(attend, make_batch):
    batch = make_batch([20], num_queries=2)
    with pytest.raises(ValueError, match="go together"):
        call(attend, batch, scores=torch.empty(1, 2, 20, device=batch.q.device))
