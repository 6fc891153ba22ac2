"""Selection ends on NaN scores too: one bad request must not hang the device that serves the others."""

import signal

import pytest
import torch
from s3r_sglang.kernels.ops.select_positions import select_positions


@pytest.fixture
def deadline():
    """Turns a search without end into a failure (under the interpreter; a GPU would hang)."""

    def expire(*_):
        raise TimeoutError("the selection did not end")

    signal.signal(signal.SIGALRM, expire)
    signal.alarm(20)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, -1], ids=["CUDA's NaN", "PyTorch's NaN", "-NaN"])
def test_groups_of_nan_end_the_search(device, deadline, bits):
    scores = torch.rand(1, 1, 4096, generator=torch.Generator().manual_seed(0))
    # Whole groups of the shortlist's bound, which are strided by an eighth of the row.
    scores.view(torch.int32).view(8, 512)[:, 200:] = bits
    positions = torch.zeros(2, 1, 64, dtype=torch.int32, device=device)
    vectors = (torch.tensor([number], device=device) for number in (4096, 20, 1))
    select_positions(scores.to(device), *vectors, positions)
    assert positions.min() >= 0
    assert positions.max() < 4096
