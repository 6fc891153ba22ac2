"""The sparse index: its budget, how that is split, and which positions a dense forward selects."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from s3r_sglang.config import S3RConfig
from s3r_sglang.index import SparseIndex, budget, plan_refresh, selection_capacity

SMALL = S3RConfig(budget_ratio=0.25, min_budget=12, recent_window=4, prompt_queries=5)
BLOCK = SMALL.draft_length + 1


@pytest.mark.parametrize(
    ("committed", "ratio", "at_least", "expected"),
    [
        (1, 0.05, 192, 1),
        (191, 0.05, 192, 191),
        (192, 0.05, 192, 192),
        (193, 0.05, 192, 192),
        (3840, 0.05, 192, 192),
        (3841, 0.05, 192, 193),
        (40_960, 0.05, 192, 2048),
        (1000, 1.0, 192, 1000),
        # Products that float64 rounds up (0.07 * 100 is 7.000000000000001) or leaves at an integer.
        (100, 0.07, 1, 7),
        (60, 0.05, 1, 3),
        (61, 0.05, 1, 4),
    ],
)
def test_budget(committed, ratio, at_least, expected):
    config = S3RConfig(budget_ratio=ratio, min_budget=at_least, recent_window=1)
    assert budget(torch.tensor([committed]), config).tolist() == [expected]
    assert config.budget(committed) == expected


@pytest.mark.parametrize("ratio", ["0.01", "0.05", "0.07", "0.1", "0.15", "0.29", "0.3", "1"])
@pytest.mark.parametrize("at_least", [1, 192])
def test_budget_is_exact_for_every_context(ratio, at_least):
    """On the device and for `meta_info`, against rational arithmetic."""
    contexts = range(1, 41_000, 13)
    config = S3RConfig(budget_ratio=float(ratio), min_budget=at_least, recent_window=1)
    expected = [min(c, max(at_least, math.ceil(Fraction(ratio) * c))) for c in contexts]
    assert budget(torch.tensor(contexts), config).tolist() == expected
    assert [config.budget(c) for c in contexts] == expected


@pytest.mark.parametrize(
    ("committed", "num_selected", "tail_start"),
    [
        (1, 0, 0),
        (63, 0, 0),
        (192, 0, 0),  # the budget covers all: one tail
        (193, 128, 129),  # K = 192: 128 selected of 0 … 128, and the newest 64
        (3841, 129, 3777),
        (40_960, 1984, 40_896),
    ],
)
def test_plan_splits_the_budget(committed, num_selected, tail_start):
    config = S3RConfig(budget_ratio=0.05, min_budget=192, recent_window=64)
    plan = plan_refresh(torch.tensor([committed]), config)
    assert plan.num_selected.tolist() == [num_selected]
    assert plan.tail_start.tolist() == [tail_start]
    if num_selected:
        assert plan.num_older.tolist() == [tail_start]
        assert num_selected + committed - tail_start == config.budget(committed)


def test_window_alone_may_use_up_the_budget():
    plan = plan_refresh(torch.tensor([500]), S3RConfig(budget_ratio=0.01, min_budget=64, recent_window=64))
    assert (plan.num_selected.item(), plan.tail_start.item()) == (0, 436)


@pytest.mark.parametrize("ratio", [0.05, 0.07, 1.0])
def test_capacity_holds_every_selection(ratio):
    config = S3RConfig(budget_ratio=ratio, min_budget=20, recent_window=20)
    longest = 3000
    selected = plan_refresh(torch.arange(1, longest + 1), config).num_selected
    assert selected.max() <= selection_capacity(config, longest)


@pytest.mark.parametrize("full", [{"budget_ratio": 1.0}, {"min_budget": 3000}])
def test_a_full_budget_needs_no_memory_for_selections(full):
    """It would take 12 GB for the Qwen3-8B shape, 256 requests and 40K tokens."""
    config = S3RConfig(**full)
    assert plan_refresh(torch.arange(1, 3001), config).num_selected.max() == 0
    assert selection_capacity(config, 3000) == 1


def test_clear_makes_drafts_dense():
    index = SparseIndex(SMALL, num_layers=1, num_slots=3, num_kv_heads=1, max_context=100, device="cpu")
    index.begin_refresh(torch.tensor([2]), torch.tensor([80]))
    assert index.tail_start.tolist() == [0, 0, 76]
    index.clear()
    assert index.tail_start.tolist() == index.num_selected.tolist() == [0, 0, 0]


def reference_index(layers, layer: int, slot: int, queries: torch.Tensor, committed: int) -> list[list[int]]:
    """TopK_{K-R}(a) over the committed positions older than the window, for each KV head, weight by weight.

    `queries` [n, Hq, D] are those of the slot's last n positions.
    """
    keys = layers.keys(layer, slot).double().numpy()
    length, num_kv_heads, head_size = keys.shape
    group = queries.shape[1] // num_kv_heads
    chosen = []
    for kv_head in range(num_kv_heads):
        mean_weight = np.zeros(length)
        for i, query in enumerate(queries.double().numpy()):
            seen = length - len(queries) + i + 1
            for head in range(kv_head * group, (kv_head + 1) * group):
                weights = np.exp(keys[:seen, kv_head] @ query[head] / math.sqrt(head_size))
                mean_weight[:seen] += weights / weights.sum() / (group * len(queries))
        selected = SMALL.budget(committed) - SMALL.recent_window
        ranked = sorted(range(committed - SMALL.recent_window), key=lambda pos: (-mean_weight[pos], pos))
        chosen.append(sorted(ranked[:selected]))
    return chosen


def check_selection(layers, layer: int, slot: int, queries: torch.Tensor, committed: int) -> None:
    count = int(layers.index.num_selected[slot])
    selected = layers.index.positions[layer, slot, :, :count].tolist()
    if count:
        assert selected == reference_index(layers, layer, slot, queries, committed)
        assert selected != [list(range(count))] * len(selected), "the lowest positions: nothing was ranked"


SHAPES = [(3, 1, 64), (2, 2, 64), (2, 4, 128), (1, 6, 128)]


@pytest.mark.parametrize(("num_kv_heads", "group", "head_size"), SHAPES)
def test_verification_selects_by_the_rule(layers_of, num_kv_heads, group, head_size):
    """All seven queries count, those of drafts that will be rejected too; drafts are not candidates."""
    layers = layers_of(SMALL, num_kv_heads, group, head_size, {5: 90, 2: 61, 3: 18})
    slots = [5, 3, 2]
    inputs = layers.random_inputs(len(slots) * BLOCK)
    layers.verify(slots, inputs)
    for layer, (packed, _, _) in enumerate(inputs):
        for slot, queries in zip(slots, packed.split(BLOCK), strict=True):
            check_selection(layers, layer, slot, queries, layers.contexts[slot] - SMALL.draft_length)
    # Slot 3 has 12 committed positions, which its budget covers.
    assert layers.index.num_selected.tolist() == [0, 0, 14 - 4, 0, 0, 21 - 4]
    assert layers.index.tail_start.tolist() == [0, 0, 55 - 4, 0, 0, 84 - 4]


@pytest.mark.parametrize(("num_kv_heads", "group", "head_size"), SHAPES)
def test_prefill_selects_by_the_last_queries(layers_of, num_kv_heads, group, head_size):
    """A long last chunk, one of three tokens only (the rest was cached), and a whole prompt."""
    layers = layers_of(SMALL, num_kv_heads, group, head_size, {1: 40, 2: 75, 4: 33})
    slots, new = [2, 4, 1], [30, 3, 40]
    inputs = layers.random_inputs(sum(new))
    layers.prefill(slots, new, inputs)
    for layer, (packed, _, _) in enumerate(inputs):
        for slot, queries in zip(slots, packed.split(new), strict=True):
            last = queries[-SMALL.prompt_queries :]
            check_selection(layers, layer, slot, last, layers.contexts[slot])
    assert layers.index.tail_start.tolist() == [0, 36, 71, 0, 29]


def test_equal_scores_go_to_the_lower_position():
    index = SparseIndex(SMALL, num_layers=1, num_slots=1, num_kv_heads=1, max_context=60, device="cpu")
    slot = torch.tensor([0])
    plan = index.begin_refresh(slot, torch.tensor([60]))
    scores = torch.zeros(1, 1, 60)
    scores[0, 0, [30, 50]] = 1.0
    index.select(0, scores, plan, slot)
    assert index.positions[0, 0, 0, :11].tolist() == [*range(9), 30, 50]


def test_drafting_leaves_the_index_alone(layers_of):
    layers = layers_of(SMALL, 1, 2, 64, {1: 70})
    layers.verify([1], layers.random_inputs(BLOCK))
    before = layers.index.positions.clone()
    layers.draft([1], 0, layers.random_inputs(1))
    assert torch.equal(layers.index.positions, before)
