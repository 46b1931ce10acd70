"""The long proof: 100 kills of training and 200 kills while saving, as the benchmark counts them."""

import pytest

from distlab.cli.bench import load_rows


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_killed_run_ends_with_the_same_bits_and_no_checkpoint_is_lost():
    rows = list(load_rows("checkpoint"))
    assert len(rows) == 3
    assert all(row.holds for row in rows), rows
