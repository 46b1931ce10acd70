"""Schedules that were run on the simulator, as their pictures take them: spans, bubble and peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distlab.plan import SCHEDULES, ActionTimes, Schedule, make_schedule
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


EQUAL = ActionTimes(1.0, 1.0, 1.0)
NAMES = tuple(SCHEDULES)
COPIES = " (two copies of the model)"  # which the peak of activations does not show


def play(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int = 2,
    times: ActionTimes = EQUAL,
    memory_limit: float | None = None,
) -> ScheduleRun:
    """Plan and run a schedule; the times are of a rank's whole share of the model, cut evenly among its stages.

    Raises:
        ValueError: the name is not known, or there is no such schedule of this size.
    """
    family = SCHEDULES.get(name)
    if family is None:
        raise ValueError(f"schedule is {name!r}; choose one of {', '.join(NAMES)}")
    stages = family.stages_per_rank(stages_per_rank if family.placement == "loop" else None)
    if stages > 1:
        forward, inputs, weights = (_share(part, stages) for part in times[:3])
        times = ActionTimes(forward, inputs, weights, times.communication)
    plan = make_schedule(
        name, num_ranks, num_microbatches, stages_per_rank=stages, times=times, memory_limit=memory_limit
    )
    return run_schedule(family.title + (COPIES if family.placement == "copies" else ""), plan, times)


def _share(part: float | Sequence[float], stages: int) -> float | list[float]:
    """Cut a rank's time among its stages; times given a stage stay as they are."""
    return part / stages if isinstance(part, int | float) else list(part)
