"""The long proof: 600 kills of training, 100 a way, and 200 while saving, as the benchmark counts them."""

import pytest

from distlab.cli.bench import load_rows


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_killed_run_ends_with_the_same_bits_and_no_checkpoint_is_lost():
    rows = list(load_rows("checkpoint"))
    assert len(rows) == 8
    assert all(row.holds for row in rows), rows
