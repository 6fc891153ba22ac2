"""Batch sizes of the draft's CUDA graphs; the graphs themselves are captured by every engine test on a GPU."""

import pytest

from s3r_sglang.graphs import halvings


@pytest.mark.parametrize(
    ("buckets", "want"),
    [
        ([1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64], [1, 2, 4, 8, 16, 32, 64]),
        ([64, 1, 8, 32], [1, 8, 32, 64]),
        ([200, 160, 96, 48], [48, 96, 200]),
        ([5], [5]),
    ],
)
def test_filtered_batches_have_half_sizes(buckets, want):
    assert halvings(buckets) == want
