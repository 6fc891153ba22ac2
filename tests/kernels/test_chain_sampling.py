"""The Triton sampling kernels against their references.

On a GPU, tests/stages/test_sampling.py runs its gates through these kernels at 200k trials; here tokens are
compared one by one: noise is bit-equal, so op and reference differ only where two candidates of a race tie
within float rounding, or a coin lies within rounding of p / q.
"""

import pytest
import torch
from s3r_sglang.kernels.ops import chain_sampling as ops
from s3r_sglang.kernels.ops._launch import num_multiprocessors
from s3r_sglang.kernels.reference import chain_sampling as reference
from s3r_sglang.kernels.reference.philox import Stream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOP_K_ALL = 1 << 30
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter lacks bfloat16 arithmetic
BATCH, DRAFTS = 4, 3


@pytest.fixture(autouse=True, params=[32, 256], ids=["many blocks", "one block"])
def block(request, monkeypatch):
    """Small blocks make a small vocabulary span several chunks and several blocks of a chunk."""
    # 4 requests: two chunks a row in the race, one in the verify statistics.
    programs = max(1, 8 // num_multiprocessors(torch.device(DEVICE)))
    monkeypatch.setattr(ops, "_TILES", ops._Tiles(request.param, num_warps=4, programs_per_sm=programs))


def make_inputs(vocab, dtype=torch.float32, greedy_rows=(1,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(BATCH, DRAFTS + 1, vocab, generator=generator)
    logits[:, :, 3::7] = float("-inf")  # tokens a grammar excludes
    logits[2, :, : vocab // 2] = float("-inf")  # a whole chunk of them
    top_ks = torch.full((BATCH,), TOP_K_ALL, dtype=torch.int32)
    top_ks[list(greedy_rows)] = 1
    return {
        "logits": logits.to(DEVICE, dtype),
        "temperatures": torch.tensor([1.0, 1.0, 0.6, 1.7], device=DEVICE),
        "top_ks": top_ks.to(DEVICE),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (BATCH,), generator=generator).to(DEVICE),
        "rounds": torch.tensor([0, 17, 4096, 2**31 - 1], device=DEVICE),
    }


def draft(module, inputs, scale=0.5):
    """Draft a chain; q lives in poisoned memory with padding between the steps."""
    vocab = inputs["logits"].shape[-1]
    q = torch.full((BATCH, DRAFTS, vocab + 8), torch.nan, device=DEVICE)[..., :vocab]
    tokens = [
        module.draft_sample(
            scale * inputs["logits"][:, j],
            inputs["temperatures"], inputs["top_ks"], inputs["seeds"], inputs["rounds"], j, q[:, j],
        )
        for j in range(DRAFTS)
    ]  # fmt: skip
    return torch.stack(tokens, dim=1), q


def verify(module, inputs, tokens, q):
    return module.verify_sample_from_logits(
        inputs["logits"].flatten(0, 1), inputs["temperatures"], inputs["top_ks"], tokens, q,
        inputs["seeds"], inputs["rounds"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(5, torch.float32), (165, torch.float32), (165, HALF)],
    ids=["tiny", "float32", "half"],
)
def test_draft_matches_the_reference(vocab, dtype):
    inputs = make_inputs(vocab, dtype)
    expected, expected_q = draft(reference, inputs)
    tokens, q = draft(ops, inputs)
    # A GPU's exp of x has a relative error of about |x| * 1e-7.
    torch.testing.assert_close(q, expected_q, rtol=1e-5, atol=1e-9)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize(("vocab", "dtype"), [(5, torch.float32), (165, HALF)], ids=["tiny", "half"])
@pytest.mark.parametrize("scale", [1.0, 0.5, -1.0], ids=["all accepted", "mixed", "adversarial"])
def test_verify_from_logits_matches_the_reference(vocab, dtype, scale):
    inputs = make_inputs(vocab, dtype)
    tokens, q = draft(reference, inputs, scale if scale > 0 else 1.0)
    if scale < 0:
        # A draft of low target probability at every step, as if q had put all its mass there.
        tokens = inputs["logits"][:, :DRAFTS].float().nan_to_num(neginf=9.0).argmin(dim=-1)
        q = torch.zeros_like(q).scatter_(2, tokens[:, :, None], 1.0)
    expected, expected_lens = verify(reference, inputs, tokens, q)
    result, lens = verify(ops, inputs, tokens, q)
    assert torch.equal(lens, expected_lens)
    assert torch.equal(result, expected)
    assert result.dtype == lens.dtype == torch.int32
    if scale == 1.0:
        assert (lens == DRAFTS + 1).all()


def test_verify_from_probs_matches_the_reference():
    inputs = make_inputs(165)
    tokens, q = draft(reference, inputs)
    p = torch.softmax(inputs["logits"], dim=-1)
    p = torch.where(p > 0.002, p, 0.0)  # as a filter would leave it; normalisation is not needed
    args = (tokens, q, inputs["seeds"], inputs["rounds"])
    for result, expected in zip(ops.verify_sample(p, *args), reference.verify_sample(p, *args), strict=True):
        assert torch.equal(result, expected)


def test_race_matches_the_reference_and_skips_zero_weights():
    inputs = make_inputs(165)
    weights = inputs["logits"][:, 0].exp()
    args = (inputs["seeds"], inputs["rounds"], 2, Stream.PREFILL)
    tokens = ops.race_sample(weights, *args)
    assert torch.equal(tokens, reference.race_sample(weights, *args))
    alone = torch.zeros_like(weights)
    alone[:, 164] = 1e-30
    assert ops.race_sample(alone, *args).tolist() == [164] * BATCH
    assert ops.race_sample(torch.zeros_like(weights), *args).tolist() == [0] * BATCH


def test_residual_without_mass_falls_back_to_p():
    """p <= q everywhere and the drafted token has p = 0: the law of the token is p."""
    vocab = 130
    p = torch.zeros(BATCH, 2, vocab, device=DEVICE)
    p[:, :, [7, 70, 111]] = torch.tensor([0.2, 0.5, 0.3], device=DEVICE)
    q = p[:, :1].clone()
    q[:, :, 0] = 1.0
    tokens = torch.zeros(BATCH, 1, dtype=torch.int64, device=DEVICE)
    seen = set()
    for round_ in range(4):
        args = (tokens, q, torch.arange(BATCH, device=DEVICE), torch.full((BATCH,), round_, device=DEVICE))
        result, lens = ops.verify_sample(p, *args)
        assert torch.equal(result, reference.verify_sample(p, *args)[0])
        assert (lens == 1).all()
        seen |= set(result[:, 0].tolist())
    assert seen == {7, 70, 111}


def test_rows_of_nan_or_fully_masked_yield_a_valid_token():
    """Padding rows of a CUDA graph hold anything; their tokens index the vocabulary in the next forward."""
    inputs = make_inputs(165)
    inputs["logits"][0] = torch.nan
    inputs["logits"][3] = float("-inf")
    tokens, q = draft(ops, inputs)
    result, lens = verify(ops, inputs, tokens, q)
    assert tokens[[0, 3]].tolist() == [[0] * DRAFTS] * 2
    assert result[[0, 3]].tolist() == [[0] * (DRAFTS + 1)] * 2
    assert lens[[0, 3]].tolist() == [1, 1]
    expected, expected_lens = verify(reference, inputs, tokens, q)
    assert torch.equal(result, expected)
    assert torch.equal(lens, expected_lens)


def test_wrong_arguments_are_refused():
    inputs = make_inputs(64)
    rest = (inputs["seeds"], inputs["rounds"])
    logits = inputs["logits"][:, 0]
    with pytest.raises(ValueError, match="q_out must be float32"):
        ops.draft_sample(logits, inputs["temperatures"], inputs["top_ks"], *rest, 0, logits.half())
    with pytest.raises(ValueError, match="contiguous along the vocabulary"):
        ops.race_sample(logits.t().contiguous().t(), *rest, 0, Stream.DRAFT)
