"""Loaded where a notebook's ranks are forked while `make test` runs its cells: measurements take one short window.

The times that a cell prints are not compared; the notebooks as they are given out hold those of whole measurements.
"""

from distlab.measure.machine import speed
from distlab.measure.runs import beside

whole = beside.time_beside


def time_beside(step, calibrate, spans, *, device="cpu", **_):
    return whole(step, calibrate, spans, num_windows=1, steps_per_window=2, device=device)


beside.time_beside = time_beside
speed.REPEATS = 1
