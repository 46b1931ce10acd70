"""Loaded where a notebook's ranks are forked while `make test` runs its cells: measurements take one short window.

A set of ranks calibrates once: whoever asks again is told the same. The times that a cell prints are not compared; the
notebooks as they are given out hold those of whole measurements. tests/measure calibrates before and after each window.
"""

import functools

from distlab.measure.machine import speed
from distlab.measure.runs import calibrate, calls, run, windows

beside_whole, round_whole = windows.time_beside, speed.measure_round
calibration_whole = calibrate.CalibrationOfRun.measure
rounds = {}


def time_beside(step, calibrate, spans, **_):
    return beside_whole(step, functools.cache(calibrate), spans, steps_per_window=2)


def time_window_of_run(*arguments, **options):
    return beside_whole(*arguments, **options | {"num_windows": 1, "steps_per_window": 2, "budget_s": 0.0})


def measure_round(device, *, works=None, nodes=None):
    """Measure once for all ranks, and once for nodes: ranks that are forked together ask together."""
    if (nodes is None) not in rounds:
        rounds[nodes is None] = round_whole(device, works=works, nodes=nodes)
    return rounds[nodes is None]


def measure(calibration):
    """Measure a plan's calls, codec and overhead before its window, and not again after it."""
    if not hasattr(calibration, "measured"):
        calibration.measured = calibration_whole(calibration)
    return calibration.measured


windows.time_beside = time_beside
run.time_beside = time_window_of_run
speed.measure_round = calibrate.measure_round = measure_round
calibrate.CalibrationOfRun.measure = measure
speed.REPEATS = calibrate.REPEATS = calls.BUCKET_REPEATS = 1
calls.IN_A_ROW = 3
