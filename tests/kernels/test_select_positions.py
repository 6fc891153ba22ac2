import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from s3r_sglang.kernels.ops import select_positions as op_module
from s3r_sglang.kernels.reference import select_positions as reference_module

IMPLEMENTATIONS = [op_module.select_positions, reference_module.select_positions]
implementations = pytest.mark.parametrize("select", IMPLEMENTATIONS, ids=["op", "reference"])
UNTOUCHED = -7


def expected(scores: np.ndarray, count: int) -> list[int]:
    """The rule by Python's own sort: highest score first, lower position first among equals."""
    return sorted(sorted(range(len(scores)), key=lambda p: (-scores[p], p))[:count])


def call(select, scores, num_candidates, num_select, slots, width):
    positions = torch.full(
        (max(slots) + 2, scores.shape[1], width), UNTOUCHED, dtype=torch.int32, device=scores.device
    )
    vectors = [torch.tensor(vector, device=scores.device) for vector in (num_candidates, num_select, slots)]
    assert select(scores, *vectors, positions) is None
    return positions.cpu()


def check(positions, scores, num_candidates, num_select, slots):
    scores = scores.cpu().numpy()
    for b, (candidates, count, slot) in enumerate(zip(num_candidates, num_select, slots, strict=True)):
        for head in range(scores.shape[1]):
            want = expected(scores[b, head, :candidates], count)
            assert positions[slot, head, :count].tolist() == want
            assert (positions[slot, head, count:] == UNTOUCHED).all()
    idle = [slot for slot in range(positions.shape[0]) if slot not in slots]
    assert (positions[idle] == UNTOUCHED).all()


@implementations
@pytest.mark.parametrize("kind", ["attention", "any sign", "two values", "all equal", "signed zeros"])
def test_equals_sorting(select, kind, device):
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(3, 2, 300, generator=generator)
    if kind == "attention":
        scores = (4 * scores).softmax(-1)
    elif kind == "two values":
        scores = (scores > 1).float()
    elif kind == "all equal":
        scores = torch.full_like(scores, 0.25)
    elif kind == "signed zeros":
        scores = 0.0 * scores
    num_candidates, num_select = [300, 137, 20], [31, 60, 20]
    scores[1, :, 137:] = torch.nan  # beyond the candidates nothing is read
    scores = scores.to(device)
    got = call(select, scores, num_candidates, num_select, [4, 0, 3], width=64)
    check(got, scores, num_candidates, num_select, [4, 0, 3])


@implementations
def test_selecting_nothing_writes_nothing(select, device):
    scores = torch.rand(2, 1, 10, device=device)
    got = call(select, scores, [10, 0], [0, 0], [1, 2], width=4)
    assert (got == UNTOUCHED).all()


@pytest.mark.parametrize("digit", [0, 1, 2, 3])
def test_ties_with_neighbours_in_every_quarter_of_the_range(digit, device):
    """Ties on one key among others that differ in the same two bits, so that each quarter is chosen.

    The bits below are ones: later passes choose the highest quarter and must keep the count of scores above.
    """
    quarters = [0, 1, 2, 3, digit, digit, 3, 2, digit, 1, 0, digit]
    bits = torch.tensor([0x3C000000 | (quarter << 8) | 0xFF for quarter in quarters], dtype=torch.int32)
    counts = list(range(len(quarters) + 1))
    scores = bits.view(torch.float32).expand(len(counts), 1, -1).contiguous().to(device)
    candidates = [len(quarters)] * len(counts)
    got = call(op_module.select_positions, scores, candidates, counts, counts, width=len(quarters))
    check(got, scores, candidates, counts, counts)


@hypothesis.settings(
    max_examples=20, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(data=st.data())
def test_op_equals_sorting_for_any_floats(device, data):
    values = st.one_of(
        st.floats(width=32, allow_nan=False), st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149)])
    )
    row = data.draw(st.lists(values, min_size=1, max_size=40))
    count = data.draw(st.integers(0, len(row)))
    scores = torch.tensor(row, dtype=torch.float32, device=device).view(1, 1, -1)
    got = call(op_module.select_positions, scores, [len(row)], [count], [2], width=40)
    check(got, scores, [len(row)], [count], [2])


@pytest.mark.parametrize("block_n", [16, 128])
def test_any_tile_gives_the_same_result(block_n, device):
    scores = torch.rand(1, 2, 70, generator=torch.Generator().manual_seed(0)).mul(20).round()
    scores = scores.to(device)
    positions = torch.full((1, 2, 40), UNTOUCHED, dtype=torch.int32, device=scores.device)
    one = torch.ones(1, dtype=torch.int32, device=scores.device)
    op_module._launch_kernel(scores, 66 * one, 37 * one, 0 * one, positions, block_n=block_n, num_warps=1)
    check(positions.cpu(), scores, [66], [37], [0])


def launch(scores, num_candidates, num_select, width, oracle=None):
    """The op with a small tile, so that short rows take the ways of long ones."""
    positions = torch.full((scores.shape[0], scores.shape[1], width), UNTOUCHED, dtype=torch.int32)
    positions = positions.to(scores.device)
    slots = torch.arange(scores.shape[0], device=scores.device)
    vectors = [torch.tensor(vector, device=scores.device) for vector in (num_candidates, num_select)]
    op_module._launch_kernel(scores, *vectors, slots, positions, block_n=64, num_warps=1)
    oracle = scores if oracle is None else oracle
    check(positions.cpu(), oracle, num_candidates, num_select, slots.tolist())


@pytest.mark.parametrize(
    ("values", "stride"), [("distinct", 303), ("few", 304), ("mostly minus infinity", 304)]
)
def test_rows_around_every_boundary(values, stride, device):
    """Sizes next to a tile, to where the bound by group maxima begins, to its alignment and to two tiles."""
    sizes = [63, 64, 65, 223, 224, 225, 256, 257, 300]
    counts = [7, 64, 9, 27, 27, 28, 32, 35, 37]
    scores = torch.randn(len(sizes), 1, stride, generator=torch.Generator().manual_seed(1))
    if values == "few":
        scores = scores.round()
    elif values == "mostly minus infinity":
        scores = scores.masked_fill(torch.arange(stride) % 16 != 5, -torch.inf)
    for b, size in enumerate(sizes):
        scores[b, :, size:] = torch.inf  # would win if it were read
    launch(scores.to(device), sizes, counts, width=64)


def test_as_many_ties_as_the_shortlist_holds(device):
    """Around its capacity of 64 positions (less the slack of a lane's four) the row itself is searched."""
    ties = [60, 61, 62, 64, 65]
    scores = torch.rand(len(ties), 1, 304, generator=torch.Generator().manual_seed(2))
    for b, number in enumerate(ties):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(b))
        listed = order[:number].sort().values
        scores[b, 0, listed] = 1.0
        scores[b, 0, listed[-10:]] = 2.0  # the end of the shortlist must be selected
    launch(scores.to(device), [300] * len(ties), [25] * len(ties), width=26)


@pytest.mark.parametrize("count", [1, 37, 299])
def test_clustered_scores(count, device):
    """All high scores in one stretch, as attention has them: they must spread over the groups."""
    scores = torch.rand(1, 1, 304, generator=torch.Generator().manual_seed(2))
    scores[:, :, 100:150] += 1
    launch(scores.to(device), [300], [count], width=300)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_nan_counts_as_minus_infinity(share, device):
    """A request with broken KV must neither hang the search nor write beyond its own selection."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(4, 1, 304, generator=generator)
    scores[0, :, 7::11] = -torch.inf
    broken = torch.rand(scores.shape, generator=generator) < share
    broken[0, :, :285] = True  # fewer numbers than are selected
    sizes, counts = [300, 300, 40, 300], [30, 200, 12, 37]
    nan = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).view(4, 1, 1)
    bits = torch.where(broken, nan, scores.view(torch.int32))
    given, meant = bits.view(torch.float32), scores.masked_fill(broken, -torch.inf)
    launch(given.to(device), sizes, counts, width=200, oracle=meant)
    got = call(reference_module.select_positions, given, sizes, counts, [0, 1, 2, 3], width=200)
    check(got, meant, sizes, counts, [0, 1, 2, 3])


def test_broken_promises(device):
    scores = torch.rand(1, 1, 10, device=device)
    with pytest.raises(ValueError, match=r"num_select\[0\] = 5 must be between 0 and"):
        call(reference_module.select_positions, scores, [10], [5], [0], width=4)
    with pytest.raises(ValueError, match=r"num_select\[0\] = 11"):
        call(reference_module.select_positions, scores, [10], [11], [0], width=20)
    # The op cannot look, so it clamps to what it can read and write.
    got = call(op_module.select_positions, scores, [10], [99], [0], width=4)
    assert got[0, 0].tolist() == expected(scores[0, 0].cpu().numpy(), 4)


@pytest.mark.gpu
def test_a_graph_follows_new_counts(capture, device):
    scores = (3 * torch.randn(2, 2, 9000, generator=torch.Generator().manual_seed(0))).softmax(-1).to(device)
    candidates, count = (
        torch.zeros(2, dtype=torch.int64, device=device),
        torch.zeros_like(scores[:, 0, 0]).int(),
    )
    slots = torch.tensor([1, 0], device=device)
    positions = torch.full((2, 2, 500), UNTOUCHED, dtype=torch.int32, device=device)
    replay = capture(lambda: op_module.select_positions(scores, candidates, count, slots, positions))
    assert (positions == UNTOUCHED).all()
    candidates.copy_(torch.tensor([9000, 300]))
    count.copy_(torch.tensor([450, 17]))
    replay()
    check(positions.cpu(), scores, [9000, 300], [450, 17], [1, 0])
