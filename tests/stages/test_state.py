"""What the state allows for."""

import pytest


@pytest.mark.parametrize(
    ("draft_length", "group", "fits"),
    [
        (6, 4, True),
        (31, 4, True),
        (32, 4, False),
        (20, 6, True),
        (21, 6, False),
        (15, 8, True),
        (16, 8, False),
    ],
)
def test_a_long_draft_for_large_groups_is_not_fused(draft_length, group, fits):
    from s3r_sglang.state import block_fits_a_tile

    assert block_fits_a_tile(draft_length + 1, group) == fits
