"""The two attention backends over one KV pool: what a draft step reads, and what verification leaves behind."""

import math

import numpy as np
import pytest
import torch

from s3r_sglang.config import S3RConfig

SMALL = S3RConfig(budget_ratio=0.25, min_budget=12, recent_window=4, prompt_queries=5)
K, BLOCK = SMALL.draft_length, SMALL.draft_length + 1
SLOTS = [4, 1]
CONTEXTS = {1: 60, 4: 83}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def step_of(inputs, step: int):
    """The rows of one draft step of inputs laid out [B * (k + 1), heads, D]."""
    return [tuple(x[step::BLOCK] for x in layer) for layer in inputs]


@pytest.fixture(params=[(3, 1, 64), (2, 4, 128)], ids=str)
def layers(request, layers_of):
    return layers_of(SMALL, *request.param, CONTEXTS)


def test_without_an_index_a_draft_is_dense(layers):
    """Each step also sees the positions of the block that earlier steps wrote."""
    inputs = layers.random_inputs(len(SLOTS) * BLOCK)
    drafted = [layers.draft(SLOTS, step, step_of(inputs, step)) for step in range(K)]
    verified = layers.verify(SLOTS, inputs)
    for layer, dense in enumerate(verified):
        for step in range(K):
            torch.testing.assert_close(drafted[step][layer], dense[step::BLOCK], **CLOSE)


def test_draft_reads_index_and_tail_and_nothing_else(layers):
    """Every other position is poisoned with NaN before the draft."""
    layers.verify(SLOTS, layers.random_inputs(len(SLOTS) * BLOCK))
    for slot in SLOTS:
        assert 0 < layers.index.num_selected[slot] < layers.index.tail_start[slot]
    readable = {slot: poison_unindexed(layers, slot) for slot in SLOTS}
    # The block starts at L; the index was made of the positions up to L, so steps 1 … k - 1 read L + 1 … too.
    inputs = [layers.random_inputs(len(SLOTS)) for _ in range(K)]
    outputs = [layers.draft(SLOTS, step, inputs[step]) for step in range(K)]
    for step in range(K):
        for layer in range(2):
            for i, slot in enumerate(SLOTS):
                query = inputs[step][layer][0][i]
                expected = attend(layers, layer, slot, query, readable[slot][layer], step)
                np.testing.assert_allclose(outputs[step][layer][i].numpy(), expected, rtol=1e-5, atol=1e-5)


def poison_unindexed(layers, slot: int) -> list[list[list[int]]]:
    """NaN into K and V of what the index of each layer and KV head leaves out; returns what it holds."""
    start = layers.contexts[slot] - BLOCK
    tail = range(int(layers.index.tail_start[slot]), start)
    pool, readable = layers.base.token_to_kv_pool, []
    for layer in range(2):
        selected = layers.index.positions[layer, slot, :, : layers.index.num_selected[slot]].tolist()
        readable.append([[*chosen, *tail] for chosen in selected])
        for head, kept in enumerate(readable[-1]):
            rows = layers.rows(slot)[sorted(set(range(layers.contexts[slot])) - set(kept))]
            pool.get_key_buffer(layer)[rows, head] = torch.nan
            pool.get_value_buffer(layer)[rows, head] = torch.nan
    return readable


def attend(layers, layer: int, slot: int, query: torch.Tensor, readable, step: int) -> np.ndarray:
    """Softmax attention [Hq, D] over the readable positions of each KV head and those of the block so far."""
    start = layers.contexts[slot] - BLOCK
    keys, values = (x(layer, slot).double().numpy() for x in (layers.keys, layers.values))
    group = len(query) // len(readable)
    rows = []
    for head, q in enumerate(query.double().numpy()):
        seen = [*readable[head // group], *range(start, start + step + 1)]
        weights = np.exp(keys[seen, head // group] @ q / math.sqrt(len(q)))
        rows.append(weights / weights.sum() @ values[seen, head // group])
    return np.stack(rows)


def test_verification_overwrites_provisional_kv(layers):
    for step in range(K):
        layers.draft(SLOTS, step, layers.random_inputs(len(SLOTS)))
    older = [layers.keys(layer, 4)[:-BLOCK].clone() for layer in range(2)]
    inputs = layers.random_inputs(len(SLOTS) * BLOCK)
    layers.verify(SLOTS, inputs)
    for layer, (_, k, v) in enumerate(inputs):
        for i, slot in enumerate(SLOTS):
            block = slice(i * BLOCK, (i + 1) * BLOCK)
            assert torch.equal(layers.keys(layer, slot)[-BLOCK:], k[block])
            assert torch.equal(layers.values(layer, slot)[-BLOCK:], v[block])
        assert torch.equal(layers.keys(layer, 4)[:-BLOCK], older[layer])


def test_fused_verification_attends_like_the_base_backend_and_scores_by_the_drafted_queries(layers_of):
    """With normalisers over the whole context, the scores are exact means over the k drafted queries."""
    fused, plain = (layers_of(SMALL, 2, 4, 64, CONTEXTS, fused=kind) for kind in (True, False))
    inputs = fused.random_inputs(len(SLOTS) * BLOCK)
    for step in range(K):
        fused.draft(SLOTS, step, step_of(inputs, step))
    expected = plain.verify(SLOTS, inputs)
    for layer, output in enumerate(fused.verify(SLOTS, inputs)):
        torch.testing.assert_close(output, expected[layer], **CLOSE)
        for i, slot in enumerate(SLOTS):
            queries = inputs[layer][0][i * BLOCK : i * BLOCK + K]
            count = int(fused.index.num_selected[slot])
            older = int(fused.index.tail_start[slot])
            scores = mean_weights(fused, layer, slot, queries)[:, :older]
            best = scores.argsort(dim=1, descending=True)[:, :count].sort(dim=1).values
            assert fused.index.positions[layer, slot, :, :count].tolist() == best.tolist()


def mean_weights(layers, layer: int, slot: int, queries: torch.Tensor) -> torch.Tensor:
    """[Hkv, L + k] mean causal weight over the queries of positions L … L + k - 1 and the heads of a group."""
    keys = layers.keys(layer, slot)[:-1].double()
    grouped = queries.double().unflatten(1, (keys.shape[1], -1))
    logits = torch.einsum("qhgd,nhd->hgqn", grouped, keys) / math.sqrt(keys.shape[2])
    unseen = torch.ones(len(queries), len(keys), dtype=torch.bool).triu(len(keys) - len(queries) + 1)
    return logits.masked_fill(unseen, -torch.inf).softmax(dim=-1).mean(dim=(1, 2))


def test_an_option_of_the_model_that_drafts_lack_is_refused(layers):
    """Attention sinks, say, arrive as a keyword; passed over, they would change what is sampled."""
    layer = layers.modules[0]
    with pytest.raises(NotImplementedError, match="layer 0 calls its attention with sinks"):
        layers.sparse.forward_decode(None, None, None, layer, None, sinks=torch.zeros(1))


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("stage", ["prefill", "verify", "draft"])
def test_a_tensor_with_too_few_rows_is_refused(layers, stage, name):
    """A single row would be broadcast over the pool, and what has no query would stay as it was allocated."""
    count = len(SLOTS) * {"prefill": 3, "verify": BLOCK, "draft": 1}[stage]
    inputs = [
        tuple(x[: 1 if name == short else count] for short, x in zip("qkv", layer, strict=True))
        for layer in layers.random_inputs(count)
    ]
    run = {
        "prefill": lambda: layers.prefill(SLOTS, [3, 3], inputs),
        "verify": lambda: layers.verify(SLOTS, inputs),
        "draft": lambda: layers.draft(SLOTS, 0, inputs),
    }[stage]
    with pytest.raises(ValueError, match=rf"{name} (has 1 rows|\(1, |must be)"):
        run()
