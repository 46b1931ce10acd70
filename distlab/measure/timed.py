"""Time windows of steps, a calibration before and after each, until enough of them are calm or time is up."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from distlab.comm.agree import group_device


def time_windows(
    window: Callable[[], float],
    calibrate: Callable[[], None],
    measured_s: list[float],
    *,
    calm: Callable[[], int],
    num_windows: int,
    budget_s: float,
    progress: Callable[[int], None],
) -> None:
    """Run on every rank: calibrate, time a window, calibrate, ... until num_windows are calm.

    Args:
        window: runs a window of steps and returns the seconds of a step.
        calibrate: takes a round of measurements and keeps it.
        measured_s: filled in, one number a window.
        calm: how many of the windows so far are calm; asked on rank 0.
        num_windows: calm windows wanted.
        budget_s: seconds after which no further window starts.
        progress: told how many windows were timed.
    """
    deadline = time.monotonic() + budget_s

    def finished() -> bool:
        """Decide on rank 0, since clocks differ; one window is always timed."""
        done = len(measured_s) > 0 and time.monotonic() > deadline
        if dist.get_rank() == 0 and len(measured_s) >= num_windows:
            done |= calm() >= num_windows
        agreed = torch.tensor(int(done), device=group_device())
        dist.broadcast(agreed, 0)
        return bool(agreed)

    calibrate()
    while not finished():
        seconds = window()
        calibrate()
        measured_s.append(seconds)
        progress(len(measured_s))
