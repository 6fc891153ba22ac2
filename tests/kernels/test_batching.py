import pytest
import torch
from s3r_sglang.kernels.reference import attention_scores, batching, select_positions, sparse_decode_attention

LENGTHS = [70, 0, 3, 41, 40, 1, 69]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1000, [[5, 2, 4, 3, 6, 0]]),
        (119, [[5, 2], [4, 3], [6], [0]]),
        (1, [[5], [2], [4], [3], [6], [0]]),
    ],
)
def test_parts_hold_like_lengths_up_to_the_limit(limit, expected, monkeypatch):
    monkeypatch.setattr(batching, "MAX_POSITIONS", limit)
    assert [part.tolist() for part in batching.parts(torch.tensor(LENGTHS))] == expected


def test_nothing_to_do_has_no_parts():
    assert list(batching.parts(torch.tensor([0, 0]))) == []
    assert list(batching.parts(torch.tensor([], dtype=torch.int64))) == []


@pytest.mark.parametrize("limit", [1, 119])
def test_results_do_not_depend_on_the_parts(limit, make_batch, monkeypatch):
    batch = make_batch(LENGTHS, num_queries=4)
    table = (batch.req_to_token, batch.req_pool_indices, batch.seq_lens)
    candidates = (batch.seq_lens - 2).clamp(min=0)
    counts = (candidates // 3).int()
    slots, device = len(batch.req_to_token), batch.q.device
    noise = torch.rand(len(LENGTHS), batch.num_kv_heads, max(LENGTHS), device=device)
    num_selected = torch.zeros(slots, dtype=torch.int32, device=device)
    num_selected[batch.req_pool_indices] = counts
    tail_start = torch.zeros_like(num_selected)
    tail_start[batch.req_pool_indices] = candidates.int()

    def results():
        positions = torch.full((slots, batch.num_kv_heads, 30), -1, dtype=torch.int32, device=device)
        select_positions.select_positions(noise, candidates, counts, batch.req_pool_indices, positions)
        scores = torch.full_like(noise, 7)
        queries = batch.seq_lens.clamp(max=4)
        attention_scores.attention_scores(
            batch.q, batch.k_cache, *table, queries, candidates, batch.scale, scores
        )
        lse = torch.empty(batch.q.shape[::2], device=device)
        out = sparse_decode_attention.sparse_decode_attention(
            batch.q[:, 0], batch.k_cache, batch.v_cache, *table, positions, num_selected, tail_start,
            batch.scale, lse=lse,
        )  # fmt: skip
        return positions, scores, out, lse

    whole = results()
    assert (whole[0] >= 0).sum() == batch.num_kv_heads * counts.sum()
    monkeypatch.setattr(batching, "MAX_POSITIONS", limit)
    for found, expected in zip(results(), whole, strict=True):
        torch.testing.assert_close(found, expected)
