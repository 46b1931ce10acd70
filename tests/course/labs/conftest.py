"""Labs on ranks that are forked with torch loaded."""

import pytest
from lab_on_ranks import QUICK, start

from distlab.cli.course import find_lab


@pytest.fixture
def lab():
    """Make `lab("03", 2, "--impl", file)` run lab 03 on two ranks with quick settings and these flags."""

    def started(number, num_ranks, *more, updates=None):
        every = start(str(find_lab(number)[1]), num_ranks, [*QUICK[number].split(), *more], updates)
        assert {rank.status for rank in every} == {every[0].status}, every
        assert not any(rank.stdout for rank in every[1:]), "rank 0 speaks for all"
        return every[0]

    return started
