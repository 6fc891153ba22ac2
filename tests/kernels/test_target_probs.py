"""The filter kernel against its reference: same probabilities, same support, ties included."""

import pytest
import torch
from s3r_sglang.kernels.ops import chain_sampling
from s3r_sglang.kernels.ops import target_probs as ops
from s3r_sglang.kernels.reference.philox import Stream
from s3r_sglang.kernels.reference.target_probs import target_probs as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOP_K_ALL = 1 << 30
# (temperature, top_k, top_p, min_p)
SETTINGS = [
    (1.0, TOP_K_ALL, 1.0, 0.0),
    (0.7, 1, 0.5, 0.0),
    (1.0, 3, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.0, TOP_K_ALL, 0.9, 0.0),
    (1.0, TOP_K_ALL, 1.0, 0.2),
    (1.3, 9, 0.6, 0.05),
    (1.0, TOP_K_ALL, 1e-6, 0.0),
]


def call(target_probs, logits, settings=SETTINGS):
    temperatures, top_ks, top_ps, min_ps = (torch.tensor(values) for values in zip(*settings, strict=True))
    limits = (temperatures.float(), top_ks.int(), top_ps.float(), min_ps.float())
    # Rows of a larger, poisoned buffer: q of a draft step is one.
    out = torch.full((len(logits), 2, logits.shape[-1]), torch.nan, device=DEVICE)[:, 0]
    assert target_probs(logits, *(x.to(DEVICE) for x in limits), out) is out
    return out


def assert_same_law(got, want):
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-8)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks a row; the interpreter's time grows with the pivots."""
    monkeypatch.setattr(ops, "BLOCK", 64)
    monkeypatch.setattr(ops, "NUM_WARPS", 4)


@pytest.mark.parametrize(("vocab", "places"), [(5, 16), (100, 16), (100, 1)])
def test_equals_the_reference(vocab, places, monkeypatch):
    monkeypatch.setattr(ops, "PLACES", places)  # 1: most rows do not fit the list
    logits = 2 * torch.randn(2 * len(SETTINGS), vocab, generator=torch.Generator().manual_seed(0))
    logits[:, 2::5] = float("-inf")
    logits = logits.to(DEVICE)
    got = call(ops.target_probs, logits)
    assert_same_law(got, call(reference, logits))
    assert ((got > 0).sum(-1) >= 1).all()


def test_ties_at_the_boundary_go_by_token_id():
    levels = torch.zeros(100)
    levels[[3, 70]] = 1 / 4
    levels[[5, 20, 66, 90]] = 1 / 16
    levels[[40, 99]] = 1 / 8
    kept = {  # (top_k, top_p, min_p): tokens that stay
        (TOP_K_ALL, 0.78, 0.0): {3, 70, 40, 99, 5},
        (TOP_K_ALL, 0.84, 0.0): {3, 70, 40, 99, 5, 20},
        (TOP_K_ALL, 0.99, 0.0): {3, 70, 40, 99, 5, 20, 66, 90},
        (7, 1.0, 0.0): {3, 70, 40, 99, 5, 20, 66},
        (1 << 10, 0.74, 0.0): {3, 70, 40, 99},
        (3, 0.9, 0.0): {3, 70, 40},
        (TOP_K_ALL, 1.0, 0.4): {3, 70, 40, 99},
        (6, 0.9, 0.2): {3, 70, 40, 99, 5, 20},
        (TOP_K_ALL, 1.0, 1.0): {3, 70},
    }
    logits = levels.log().repeat(len(kept), 1).to(DEVICE)
    got = call(ops.target_probs, logits, [(1.0, *limits) for limits in kept])
    for row, tokens in zip(got, kept.values(), strict=True):
        assert set(row.nonzero().flatten().tolist()) == tokens
    assert_same_law(got, call(reference, logits, [(1.0, *limits) for limits in kept]))


def test_a_mass_of_exactly_top_p_keeps_the_next_token():
    """Probabilities of 1/16 and their sums are exact in float32."""
    logits = torch.full((1, 100), float("-inf"), device=DEVICE)
    logits[0, 6::6] = 0.0
    got = call(ops.target_probs, logits, [(1.0, TOP_K_ALL, 0.5, 0.0)])
    assert got[0].nonzero().flatten().tolist() == list(range(6, 6 + 9 * 6, 6))
    assert_same_law(got, call(reference, logits, [(1.0, TOP_K_ALL, 0.5, 0.0)]))


def test_a_row_without_filters_does_not_depend_on_its_neighbours():
    logits = torch.randn(3, 150, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got = call(ops.target_probs, logits, [SETTINGS[3], SETTINGS[0], SETTINGS[4]])
    q = torch.empty_like(logits)
    ones = torch.ones(3, device=DEVICE)
    top_ks = torch.full((3,), TOP_K_ALL, dtype=torch.int32, device=DEVICE)
    chain_sampling.draft_sample(logits, ones, top_ks, ones.long(), ones.long(), 0, q)
    assert torch.equal(got[1], q[1])


def test_rows_of_nan_or_fully_masked_yield_a_valid_token():
    logits = torch.zeros(2, 90, device=DEVICE)
    logits[0] = torch.nan
    logits[1] = float("-inf")
    probs = call(ops.target_probs, logits, [SETTINGS[3], SETTINGS[5]])
    ones = torch.ones(2, dtype=torch.int64, device=DEVICE)
    assert chain_sampling.race_sample(probs, ones, ones, 0, Stream.DRAFT).tolist() == [0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_vocabulary(dtype, monkeypatch):
    monkeypatch.undo()
    logits = (3 * torch.randn(2 * len(SETTINGS), 151_936, device=DEVICE)).to(dtype)
    got, want = call(ops.target_probs, logits), call(reference, logits)
    # The mass at the boundary of top_p is summed in another order: a few of the tail's tokens may differ.
    assert ((got > 0) != (want > 0)).sum(-1).max() <= 20
    assert (got - want).abs().sum(-1).max() < 1e-3


def test_wrong_arguments_are_refused():
    logits = torch.zeros(4, 64, device=DEVICE)
    ones = torch.ones(4, device=DEVICE)
    with pytest.raises(ValueError, match="4 rows for 3 requests"):
        ops.target_probs(logits, ones[:3], ones[:3].int(), ones[:3], ones[:3], logits.clone())
    with pytest.raises(ValueError, match="top_ps must be"):
        ops.target_probs(logits, ones, ones.int(), ones.double(), ones, logits.clone())
    with pytest.raises(ValueError, match="out must be"):
        ops.target_probs(logits, ones, ones.int(), ones, ones, logits.half())
