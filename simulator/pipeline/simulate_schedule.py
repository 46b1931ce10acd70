"""Simulate any pipeline schedule from the times of its actions, exactly, in whole nanoseconds.

    run = simulate_schedule(one_f_one_b(4, 16), ActionTimes(1.0, 1.0, 1.0, communication=0.1))
    run.duration_s, run.bubble_fraction, run.peak_in_flight, run.trace

An action starts when its rank is free and what it needs has arrived. What a different rank hands over arrives
`communication` after it was made; hand-overs do not wait for one another. (`simulate`, for a whole step on a described
cluster, lets messages queue where a link is the bottleneck.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distlab.plan import ActionTimes, Schedule
from distlab.trace import Trace
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.schedule_arrays import LETTERS, Floats, Ints, ScheduleArrays, arrays_of, peak_in_flight
from simulator.units import to_s

LONGEST_NS = 2**50  # thirteen days: sums of times up to this one stay exact


@dataclass(frozen=True, eq=False)
class PipelineRun:
    """What a simulated schedule did: when each action ran, and what follows from that.

    Attributes:
        compiled: the schedule.
        start_ns: start of each action.
        end_ns: end of each action.
        handover_ns: how long each stage's output travels to a different rank.
    """

    compiled: CompiledSchedule
    start_ns: Ints
    end_ns: Ints
    handover_ns: Ints

    @property
    def order(self) -> ScheduleArrays:
        """The actions, rank after rank."""
        return self.compiled.order

    @property
    def duration_s(self) -> float:
        """Seconds from the first action's start to the last one's end: one step alone."""
        return to_s(int(self.end_ns.max(initial=0)))

    @property
    def steady_s(self) -> float:
        """Seconds of each of many equal steps in a row: the longest time from a rank's own first start to its own end.

        Zero-bubble papers call it the cost. `duration_s`, one step alone, also counts the waits before a rank begins
        and after it ends.
        """
        offsets = np.unique(self.order.offsets)  # a rank with nothing to do begins where the next one does
        return to_s(int((self.end_ns[offsets[1:] - 1] - self.start_ns[offsets[:-1]]).max(initial=0)))

    @property
    def work_s(self) -> float:
        """Seconds of computing on all ranks together: what one rank alone would take."""
        return to_s(int((self.end_ns - self.start_ns).sum()))

    @property
    def ideal_s(self) -> float:
        """Seconds that the step would take if no rank ever waited and all had the same work."""
        return self.work_s / self.order.num_ranks

    @property
    def bubble_fraction(self) -> float:
        """Idle over total time of the ranks."""
        return 1 - self.ideal_s / self.duration_s if self.duration_s else 0.0

    @property
    def speedup(self) -> float:
        """How many times faster the step is than on one rank."""
        return self.work_s / self.duration_s if self.duration_s else 1.0

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of computing of each rank."""
        so_far = np.append(0, np.cumsum(self.end_ns - self.start_ns))
        return tuple(to_s(int(each)) for each in np.diff(so_far[self.order.offsets]))

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The largest number of micro-batches (per stage) that each rank holds at once."""
        return tuple(peak_in_flight(self.order).tolist())

    @cached_property
    def trace(self) -> Trace:
        """The run as spans: computing in lane "compute", messages between ranks in lane "send"."""
        return Trace.concatenate([spans_of_actions(self.order, self.start_ns, self.end_ns), self._sends()])

    def _sends(self) -> Trace:
        order = self.order
        rows = self.compiled.needed[self.compiled.remote]
        rows = rows[self.handover_ns[order.stage[rows]] > 0]
        columns = (order.stage[rows].tolist(), order.kind[rows].tolist(), order.microbatch[rows].tolist())
        return Trace.from_columns(
            rank=self.compiled.rank[rows],
            lane="send",
            name=[f"{stage}SEND_{'B' if kind else 'F'}{mb}" for stage, kind, mb in zip(*columns, strict=True)],
            kind="send",
            start_ns=self.end_ns[rows],
            end_ns=self.end_ns[rows] + self.handover_ns[order.stage[rows]],
            stage=order.stage[rows],
            microbatch=order.microbatch[rows],
        )


def spans_of_actions(order: ScheduleArrays, start_ns: Ints, end_ns: Ints, names: Sequence[str] = ()) -> Trace:
    """Return actions as spans of lane "compute", with the names of the grammar ("2F0") or their own."""
    columns = (order.stage.tolist(), order.kind.tolist(), order.microbatch.tolist())
    grammar = (f"{stage}{LETTERS[kind]}{microbatch}" for stage, kind, microbatch in zip(*columns, strict=True))
    return Trace.from_columns(
        rank=order.rank,
        lane="compute",
        name=names or list(grammar),
        kind=[LETTERS[kind] for kind in columns[1]],
        start_ns=start_ns,
        end_ns=end_ns,
        stage=order.stage,
        microbatch=order.microbatch,
    )


def simulate_schedule(
    schedule: Schedule, times: ActionTimes, *, unit_s: float = 1e-3, slow_ranks: Mapping[int, float] | None = None
) -> PipelineRun:
    """Simulate a schedule.

    Args:
        schedule: any order of actions; its own sends and receives are left out, since hand-overs are derived.
        times: of the actions, in units of `unit_s`. B takes input_gradient + weight_gradient; communication is counted
            for the stage that hands over.
        unit_s: seconds of one unit; 1e-3: times are in milliseconds.
        slow_ranks: factors of the times of some ranks: {2: 1.3} makes rank 2 take 1.3 times as long (a straggler).

    Cost: one step of vectors over the ranks for each level: about as many levels as one rank has actions. One
        cumulative sum where only one rank works at a time.
    Error: exact in whole nanoseconds; each time is rounded to one.

    Raises:
        ValueError: the schedule deadlocks or lacks an action; a time is negative; or times are given for a different
            number of stages.
    """
    compiled = CompiledSchedule(arrays_of(schedule))
    order = compiled.order
    table, handover = _tables(times, unit_s, schedule.num_stages)
    duration = table[order.stage, order.kind]
    if slow_ranks:
        duration = np.rint(duration * _slow_factors(slow_ranks, order.num_ranks)[compiled.rank]).astype(np.int64)
    end = compiled.run(duration, handover.take(order.stage.take(compiled.needed, mode="clip")))
    return PipelineRun(compiled, end - duration, end, handover)


def _slow_factors(slow_ranks: Mapping[int, float], num_ranks: int) -> Floats:
    """Return the factor of each rank's times: 1 where `slow_ranks` does not name it."""
    for rank, factor in slow_ranks.items():
        if not (0 <= rank < num_ranks and 0 < factor < math.inf):
            raise ValueError(
                f"slow_ranks has {rank}: {factor!r}; pass a rank of 0..{num_ranks - 1} and a factor above 0, as 1.3"
            )
    return np.array([slow_ranks.get(rank, 1.0) for rank in range(num_ranks)])


def _tables(times: ActionTimes, unit_s: float, num_stages: int) -> tuple[Ints, Ints]:
    """Return nanoseconds of each stage's F, B, I and W [S, 4], and of what it hands over [S]."""
    columns = {name: _per_stage(name, value, unit_s, num_stages) for name, value in times._asdict().items()}
    forward, handover = columns["forward"], columns["communication"]
    inputs, weights = columns["input_gradient"], columns["weight_gradient"]
    return np.stack([forward, inputs + weights, inputs, weights], axis=1), handover


def _per_stage(name: str, value: float | Sequence[float], unit_s: float, num_stages: int) -> Ints:
    numbers = np.asarray(value, np.float64).reshape(-1)
    if numbers.size not in (1, num_stages):
        raise ValueError(
            f"times has {numbers.size} numbers of {name}; pass one, or one for each of {num_stages} stages"
        )
    if not ((numbers >= 0) & (numbers * unit_s * 1e9 < LONGEST_NS)).all():
        raise ValueError(f"times has {name} of {value!r}; pass times >= 0, in units of {unit_s:g} s")
    return np.broadcast_to(np.rint(numbers * (unit_s * 1e9)).astype(np.int64), num_stages).copy()
