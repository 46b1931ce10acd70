"""A schedule that was run on the simulator, as the pictures of schedules take it: its spans, its bubble, its peak."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distlab.plan import ActionTimes, Schedule
from distlab.trace import Trace
from simulator.pipeline.schedule_arrays import LETTERS
from simulator.pipeline.simulate_schedule import PipelineRun, simulate_schedule
from simulator.viz.drawing.lanes import stages_of_ranks

UNIT_S = 1e-3  # a time of 1 is a millisecond on screen


class ScheduleRun(NamedTuple):
    """One schedule and the times of its run.

    Attributes:
        name: what a reader calls it.
        schedule: the computations of each rank.
        trace: one span per action. Its name is one letter, so that a trace of 200,000 actions is quick to make.
        duration_s: from the first action to the last.
        rank_span_s: the longest that any rank takes from its own first action to its own last.
        bubble_fraction: idle time over total time.
        peak: the most that any rank holds, in micro-batches through all of its stages.
        speedup: the time of one rank that does everything alone, over the duration.
    """

    name: str
    schedule: Schedule
    trace: Trace
    duration_s: float
    rank_span_s: float
    bubble_fraction: float
    peak: float
    speedup: float

    @property
    def ends_apart(self) -> bool:
        """Whether ranks begin and end one after the other, each in less time than the whole."""
        return self.rank_span_s < 0.995 * self.duration_s

    @property
    def idle_of_span(self) -> float:
        """The idle share where steps follow one another as closely as the longest rank's span allows.

        Source: Qi et al. 2023 (arXiv:2401.10241), section 4.3: bubble rate (cost - m (F + B + W)) / cost.
        """
        work_s = self.speedup * self.duration_s / self.schedule.num_ranks
        return max(0.0, 1 - work_s / self.rank_span_s) if self.rank_span_s else 0.0


def run_schedule(name: str, schedule: Schedule, times: ActionTimes) -> ScheduleRun:
    """Run a schedule with times in milliseconds.

    Raises:
        ValueError: the schedule cannot run; the text says which rank waits for what.
    """
    run = simulate_schedule(schedule, times, unit_s=UNIT_S)
    trace = _lean(run)
    present = stages_of_ranks(trace.rank, trace.stage)
    copies = int(present.sum(axis=0).max(initial=1))  # of the model: a micro-batch goes through one of them
    num_stages = np.maximum(present.sum(axis=1) // copies, 1)
    peak = float((np.asarray(run.peak_in_flight)[: len(num_stages)] / num_stages).max())
    begins, stops = run.order.offsets[:-1], run.order.offsets[1:]
    works = stops > begins
    spans_ns = run.end_ns[stops[works] - 1] - run.start_ns[begins[works]]
    return ScheduleRun(
        name,
        schedule,
        trace,
        run.duration_s,
        int(spans_ns.max(initial=0)) / 1e9,
        run.bubble_fraction,
        peak,
        run.speedup,
    )


def _lean(run: PipelineRun) -> Trace:
    """Return the computations alone: no text per action, which would take longer than all the rest."""
    order, count = run.order, len(run.start_ns)
    kind = order.kind.astype(np.int32) + 1
    return Trace(
        rank=order.rank.astype(np.int32),
        lane=np.zeros(count, np.int32),
        name=kind,
        kind=kind,
        start_ns=run.start_ns,
        end_ns=run.end_ns,
        num_bytes=np.zeros(count, np.int64),
        stage=order.stage.astype(np.int32),
        microbatch=order.microbatch.astype(np.int32),
        words=("compute", *LETTERS),
    )
