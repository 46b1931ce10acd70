"""Lay measured steps over predictions: those of a `TrainingRun`, or of any program that `time_beside` timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distlab.measure.runs.run import RunResult
from distlab.measure.runs.windows import RankReport, Window, trouble_of, windows_between
from distlab.trace import Trace

if TYPE_CHECKING:
    from simulator.viz import Overlay


def overlay_of(
    reports: Sequence[RankReport],
    predict: Callable[[Sequence[Any]], Trace],
    *,
    calls: Trace | None = None,
) -> Overlay:
    """Lay the steps that `time_beside` timed over predictions from the calibrations around them.

    Args:
        reports: of all ranks.
        predict: the step as calibration rounds together say it is.
        calls: what a recorder saw of all ranks, to be drawn too.
    """
    first = reports[0]
    windows = windows_between(
        first.measured_s,
        lambda window, start, stop: predict(first.rounds[start:stop]).duration_s,
        taken_cores=first.taken_cores,
    )
    return _overlay(reports, windows, predict(first.rounds), calls)


def overlay_of_run(result: RunResult, *, calls: Trace | None = None) -> Overlay:
    """Lay the timed steps of a run over the predictions from its calibrations; see `overlay_of`."""
    return _overlay(result.reports, result.windows, result.predicted.trace, calls)


def _overlay(
    reports: Sequence[RankReport], windows: Sequence[Window], predicted: Trace, calls: Trace | None
) -> Overlay:
    """Take the windows in which the machine was not busy, or else all. A step lasts as long as on its slowest rank."""
    from simulator.viz import Overlay  # here: ranks that only time steps need no pictures

    kept = [index for index, window in enumerate(windows) if not window.busy] or range(len(windows))
    lengths_ns = np.array([np.diff(report.step_ns, axis=1)[:, 0] for report in reports]).max(axis=0)
    timed = np.arange(len(lengths_ns)).reshape(len(windows), -1)[kept].ravel()
    counted_ns = lengths_ns[timed]
    nearest = int(timed[np.abs(counted_ns - np.median(counted_ns)).argmin()])
    traces = [report.step_trace(nearest) for report in reports]
    if calls is not None:
        traces += [_in_step(calls, rank, report.step_ns[nearest]) for rank, report in enumerate(reports)]
    measured = Trace.concatenate(traces).from_zero()
    said = [(one.predicted_s, one.predicted_before_s, one.predicted_after_s) for one in map(windows.__getitem__, kept)]
    return Overlay(measured, predicted, (counted_ns / 1e9).tolist(), np.ravel(said).tolist(), trouble_of(windows))


def _in_step(calls: Trace, rank: int, step_ns: tuple[int, int]) -> Trace:
    """Return the calls that a rank made in a step."""
    return calls.select((calls.rank == rank) & (calls.start_ns >= step_ns[0]) & (calls.end_ns <= step_ns[1]))
