"""Philox against Random123's published vectors, and the uniformity and distinctness of what it yields."""

import pytest
import torch
from s3r_sglang.kernels.ops import philox as ops
from s3r_sglang.kernels.reference import philox as reference
from s3r_sglang.kernels.reference.philox import Stream
from scipy import stats

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# philox4x32-10 lines of Random123's kat_vectors: counter, key, output.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
BOTH = [pytest.param(reference.random_words, id="reference"), pytest.param(ops.random_words, id="op")]


def signed64(low, high):
    value = low | high << 32
    return value - (1 << 64) if value >> 63 else value


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers(counter, key, output):
    words = reference.philox(torch.tensor([signed64(*key)]), *(torch.tensor([c]) for c in counter))
    assert [word.item() for word in words] == output


@pytest.mark.parametrize("random_words", BOTH)
def test_random_words_are_philox_of_the_documented_counter(random_words):
    """Lane v is word v % 4 of counter (v // 4, round, step, stream) under the request's seed."""
    seeds = torch.tensor([signed64(0xA4093822, 0x299F31D0), -1, 5], device=DEVICE)
    rounds = torch.tensor([0x05A308D3, 7, 2**31 - 1], device=DEVICE)
    steps = torch.tensor([3, 0, 6], device=DEVICE)
    words = random_words(seeds, rounds, steps, Stream.RESIDUAL, 1030).cpu()
    assert words.shape == (3, 1030)
    for row, lane in [(0, 0), (0, 1029), (1, 6), (2, 511), (2, 1024)]:
        lanes, stream = torch.tensor([lane // 4]), torch.tensor([int(Stream.RESIDUAL)])
        counter = (lanes, rounds[row].cpu()[None], steps[row].cpu()[None], stream)
        assert words[row, lane] == reference.philox(seeds[row].cpu()[None], *counter)[lane % 4]


def test_op_is_bit_equal_to_the_reference():
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator).to(DEVICE)
    rounds = torch.randint(0, 2**31, (5,), generator=generator).to(DEVICE)
    for stream in Stream:
        args = (seeds, rounds, 4, stream, 2051)
        assert torch.equal(ops.random_words(*args), reference.random_words(*args))


def test_words_are_uniform_and_uncorrelated():
    seeds = torch.arange(64)
    words = reference.random_words(seeds, torch.full((64,), 100), 0, Stream.DRAFT, 4096)
    uniform = ((words.double() + 0.5) * 2.0**-32).numpy()
    assert stats.kstest(uniform.ravel(), "uniform").pvalue > 1e-4
    low_bits = torch.bincount((words & 0xFF).flatten(), minlength=256)
    assert stats.chisquare(low_bits.numpy()).pvalue > 1e-4
    for other in (
        reference.random_words(seeds, torch.full((64,), 101), 0, Stream.DRAFT, 4096),
        reference.random_words(seeds, torch.full((64,), 100), 1, Stream.DRAFT, 4096),
        reference.random_words(seeds, torch.full((64,), 100), 0, Stream.ACCEPT, 4096),
        reference.random_words(seeds + 64, torch.full((64,), 100), 0, Stream.DRAFT, 4096),
    ):
        assert stats.pearsonr(words.double().flatten(), other.double().flatten()).pvalue > 1e-4
        assert (words == other).float().mean() < 1e-4


def test_no_two_purposes_of_a_request_share_a_word():
    """All (round, step, stream) of a run draw from different counters, hence different words."""
    seed = torch.zeros(40, dtype=torch.int64)
    drawn = [
        reference.random_words(seed, torch.arange(40), step, stream, 4)
        for step in range(7)
        for stream in Stream
    ]
    words = torch.stack(drawn)
    # 4480 words of 32 bits collide with probability 0.2%; equal pairs of neighbours never should.
    assert len(torch.unique(words.view(-1, 4), dim=0)) == words.numel() // 4


def test_coins_and_exponentials_stay_in_range():
    extremes = torch.tensor([0, 1, 2**31, 2**32 - 1])
    coins = reference.coins(extremes)
    assert coins[0] == 0
    assert coins.max() < 1
    exponentials = reference.exponentials(extremes)
    assert (exponentials > 0).all()
    assert exponentials.isfinite().all()
    # Full relative precision where races are decided: U = 2**-33 and 1.5 * 2**-32.
    torch.testing.assert_close(exponentials[:2].double(), torch.tensor([2.0**-33, 1.5 * 2.0**-32]).double())


def test_exponentials_follow_their_law():
    words = reference.random_words(torch.arange(64), torch.zeros(64), 0, Stream.DRAFT, 4096)
    assert stats.kstest(reference.exponentials(words).flatten().numpy(), "expon").pvalue > 1e-4
