"""Labs on ranks that are forked with torch loaded."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from lab_on_ranks import LIMIT_S, QUICK, Ended, run_as_torchrun_does

from distlab.cli.lab import find_lab
from distlab.comm import run
from distlab.comm.launch.fork_client import preload


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
        import torch.distributed as dist

        preload("distlab.lab", "distlab.measure.machine.speed", "distlab.measure.count.module", "simulator")
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        call = (str(find_lab(number)[1]), [*QUICK[number].split(), *more], store.port, str(folder))
        started_so = functools.partial(run_as_torchrun_does, hidden=hidden, calibrated=calibrated, updates=updates)
        every = run(started_so, num_ranks, args=call, timeout_s=LIMIT_S, record=False, echo=False)
        assert {rank.status for rank in every} == {every[0].status}, every
        assert not any(rank.stdout for rank in every[1:]), "rank 0 speaks for all"
        return Ended(every[0].status, every[0].stdout, "\n".join(filter(None, (rank.failures for rank in every))))

    return started
