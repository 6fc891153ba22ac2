import pytest
import torch
import triton
from s3r_sglang.kernels.ops import _launch
from s3r_sglang.kernels.ops.select_positions import select_positions


@pytest.fixture
def _h200(monkeypatch):
    monkeypatch.setattr(_launch, "num_multiprocessors", lambda device: 132)


@pytest.mark.usefixtures("_h200")
@pytest.mark.parametrize(
    ("pairs", "max_splits", "want"),
    [
        (512, 16, 1),  # 64 requests of 8 KV heads fill the device
        (128, 16, 4),
        (8, 16, 16),  # one request: as many as there is work for
        (8, 13, 8),  # a power of two
        (8, 1, 1),
        (_launch.MAX_SPLIT_PAIRS + 1, 16, 1),
    ],
)
def test_splits_fill_the_device(pairs, max_splits, want):
    splits = _launch.num_splits(torch.device("cuda"), pairs, programs_per_sm=4, max_splits=max_splits)
    assert splits == want


@pytest.mark.usefixtures("_h200")
@pytest.mark.parametrize(
    ("pairs", "max_splits", "want"),
    [
        (512, 64, 1),  # two waves of 264 programs, 97% full
        (256, 64, 1),
        (384, 64, 2),  # 768 programs fill three waves; 384 would leave a quarter of two waves empty
        (8, 64, 32),
        (2, 64, 64),  # as many as there are
        (8, 5, 4),
        (8, 0, 1),
    ],
)
def test_even_splits_fill_whole_waves(pairs, max_splits, want):
    assert _launch.even_splits(torch.device("cuda"), pairs, 2, max_splits) == want


@pytest.mark.usefixtures("_h200")
def test_splitting_launches_find_their_counters():
    largest = max(
        pairs
        for pairs in range(1, 4 * _launch.MAX_SPLIT_PAIRS)
        if _launch.num_splits(torch.device("cuda"), pairs, programs_per_sm=64, max_splits=16) > 1
    )
    assert largest <= len(_launch.arrival_counters(torch.device("cpu")))


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"call s3r_sglang\.kernels\.reference\.select_positions"):
        select_positions(torch.ones(1, 1, 4), one, one, one, torch.zeros(2, 1, 4, dtype=torch.int32))
