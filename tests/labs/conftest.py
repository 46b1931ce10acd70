"""Labs on ranks that are forked with torch loaded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from lab_on_ranks import QUICK, Ended, start

from distlab.cli.course.lab import find_lab


@pytest.fixture
def lab(tmp_path: Path) -> Callable[..., Ended]:
    """Make `lab("03", 2, "--impl", file)` run lab 03 on two ranks with quick settings and these flags.

    Times are not judged here, so only `calibrated` labs take the seconds of a calibration.
    """

    def started(
        number: str,
        num_ranks: int,
        *more: str,
        hidden: tuple[str, ...] = (),
        calibrated: bool = False,
        updates: Path | None = None,
    ) -> Ended:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        arguments = [*QUICK[number].split(), *more]
        every = start(
            str(find_lab(number)[1]),
            num_ranks,
            arguments,
            folder,
            hidden=hidden,
            calibrated=calibrated,
            updates=updates,
        )
        assert {rank.status for rank in every} == {every[0].status}, every
        assert not any(rank.stdout for rank in every[1:]), "rank 0 speaks for all"
        return Ended(every[0].status, every[0].stdout, "\n".join(filter(None, (rank.failures for rank in every))))

    return started
