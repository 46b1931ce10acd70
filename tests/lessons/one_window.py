"""Loaded where a notebook's ranks are forked while `make test` runs its cells: measurements take one short window.

The times that a cell prints are not compared; the notebooks as they are given out hold those of whole measurements.
"""

from distlab.measure.machine import speed
from distlab.measure.runs import beside, overhead, run

beside_whole, windows_whole = beside.time_beside, run.time_windows


def time_beside(step, calibrate, spans, *, device="cpu", **_):
    return beside_whole(step, calibrate, spans, num_windows=1, steps_per_window=2, device=device)


def time_windows(measured_s, **options):
    windows_whole(measured_s, **options | {"num_windows": 1, "budget_s": 0.0})


beside.time_beside, run.time_windows = time_beside, time_windows
speed.REPEATS = overhead.REPEATS = 1
