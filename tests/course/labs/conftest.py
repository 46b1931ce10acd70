"""Labs on ranks that are forked with torch loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lab_on_ranks import QUICK, Ended, start

from distlab.cli.course import find_lab


@pytest.fixture
def lab() -> Callable[..., Ended]:
    """Make `lab("03", 2, "--impl", file)` run lab 03 on two ranks with quick settings and these flags.

    Times are not judged here, so only `calibrated` labs take the seconds of a calibration.
    """

    def started(number: str, num_ranks: int, *more: str, **changes: Any) -> Ended:
        arguments = [*QUICK[number].split(), *more]
        changes = {"calibrated": False, "updates": None} | changes
        every = start(str(find_lab(number)[1]), num_ranks, arguments, **changes)
        assert {rank.status for rank in every} == {every[0].status}, every
        assert not any(rank.stdout for rank in every[1:]), "rank 0 speaks for all"
        return every[0]

    return started
