"""Pipeline: simulate any schedule from the times of its actions, exactly, in whole nanoseconds.

    run = simulate_schedule(one_f_one_b(4, 16), ActionTimes(1.0, 1.0, 1.0, communication=0.1))
    run.duration_s, run.bubble_fraction, run.peak_in_flight, run.trace

An action starts when its rank is free and what it needs has arrived. What another rank hands over arrives
`communication` after it was made; hand-overs do not wait for one another. (`simulate`, for a whole step on a described
cluster, lets messages queue where a link is the bottleneck.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from distlab.plan import ActionTimes, Schedule
from distlab.trace import Trace
from simulator.pipeline.compiled import LARGE, CompiledOrder, keep_freed_memory
from simulator.pipeline.dependencies import find_needs
from simulator.pipeline.folds import Fold
from simulator.pipeline.jitter import Jitter, slow_factors, stretched
from simulator.pipeline.schedule_arrays import LETTERS, B, F, I, Order, W, order_of, peak_in_flight
from simulator.pipeline.steady import fold, likely_periods
from simulator.units import to_s

__all__ = [
    "LETTERS",
    "ActionTimes",
    "B",
    "CompiledOrder",
    "F",
    "I",
    "Jitter",
    "Order",
    "PipelineRun",
    "W",
    "forget_orders",
    "order_of",
    "peak_in_flight",
    "simulate_schedule",
]

Ints = NDArray[np.int64]
SAMPLED = 1000  # rows
LONGEST_NS = 2**50  # a time of thirteen days, so that sums stay exact


@dataclass(frozen=True, eq=False)
class PipelineRun:
    """What a simulated schedule did: when each action ran, and what follows from that.

    Attributes:
        order: the actions, rank after rank.
        start_ns: start of each action.
        end_ns: end of each action.
        handover_ns: how long what each stage hands over to another rank is under way.
    """

    order: Order
    start_ns: Ints
    end_ns: Ints
    handover_ns: Ints

    @property
    def duration_s(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        return to_s(int(self.end_ns.max(initial=0)))

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
        """The most micro-batches (a stage each) that each rank holds: forward has run, and B or W has not."""
        return tuple(peak_in_flight(self.order).tolist())

    @cached_property
    def need(self) -> NDArray[np.int32]:
        """The action that each one needs, or -1."""
        return find_needs(self.order, self.order.rank.astype(np.int32))[0]

    @cached_property
    def remote(self) -> NDArray[np.bool_]:
        """Whether an action waits for another rank."""
        rank = self.order.rank
        elsewhere: NDArray[np.bool_] = rank.take(self.need, mode="clip") != rank
        return elsewhere & (self.need >= 0)

    @cached_property
    def trace(self) -> Trace:
        """The run as spans: computing in lane "compute", what is under way between ranks in lane "send"."""
        return Trace.concatenate([self._computing(), self._sends()])

    def _computing(self) -> Trace:
        order = self.order
        columns = (order.stage.tolist(), order.kind.tolist(), order.microbatch.tolist())
        return Trace.from_columns(
            rank=order.rank,
            lane="compute",
            name=[f"{stage}{LETTERS[kind]}{microbatch}" for stage, kind, microbatch in zip(*columns, strict=True)],
            kind=[LETTERS[kind] for kind in columns[1]],
            start_ns=self.start_ns,
            end_ns=self.end_ns,
            stage=order.stage,
            microbatch=order.microbatch,
        )

    def _sends(self) -> Trace:
        order = self.order
        rows = self.need[self.remote]
        rows = rows[self.handover_ns[order.stage[rows]] > 0]
        columns = (order.stage[rows].tolist(), order.kind[rows].tolist(), order.microbatch[rows].tolist())
        return Trace.from_columns(
            rank=order.rank[rows],
            lane="send",
            name=[f"{stage}SEND_{'B' if kind else 'F'}{mb}" for stage, kind, mb in zip(*columns, strict=True)],
            kind="send",
            start_ns=self.end_ns[rows],
            end_ns=self.end_ns[rows] + self.handover_ns[order.stage[rows]],
            stage=order.stage[rows],
            microbatch=order.microbatch[rows],
        )


def simulate_schedule(
    schedule: Schedule,
    times: ActionTimes,
    *,
    unit_s: float = 1e-3,
    slow_ranks: Mapping[int, float] | None = None,
    jitter: Jitter | None = None,
) -> PipelineRun:
    """Run a schedule on paper.

    Args:
        schedule: any order; its own sends and receives are left out, since hand-overs are derived.
        times: of the actions, in units of `unit_s`; B takes input_gradient + weight_gradient; communication is that of
            the stage which hands over.
        unit_s: seconds of one unit; 1e-3: times are in milliseconds.
        slow_ranks: factors of the times of some ranks: {2: 1.3} makes rank 2 take 1.3 times as long (a straggler).
        jitter: a random factor for each action.

    Cost: one vector step of the ranks for each level of the order (about two a micro-batch and stage of a rank), and
        less where the steady state repeats.
    Error: exact in whole nanoseconds; each time is rounded to one.

    Raises:
        ValueError: the schedule deadlocks or lacks something; a time is negative, or there are not as many as stages.
    """
    if len(schedule) > LARGE:
        keep_freed_memory()
    order = order_of(schedule)
    table, handover = _tables(times, unit_s, schedule.num_stages)
    if not slow_ranks and jitter is None:
        found = _from_fewer(_Key(schedule), table, handover)
        if found is not None:
            return PipelineRun(order, *found, handover)
    compiled = _compiled(_Key(schedule))
    duration = table.reshape(-1).take(compiled.code)
    if slow_ranks or jitter is not None:
        factors = slow_factors(slow_ranks, order.num_ranks)[compiled.rank]
        duration = stretched(duration, factors if jitter is None else factors * jitter.factors(len(duration)))
        end = compiled.run(duration, handover.take(order.stage.take(compiled.need, mode="clip")))
    else:
        end = compiled.run_by_stage(table, handover, duration)
    return PipelineRun(order, end - duration, end, handover)


class _Key:
    """A schedule to look up by: its hash reads a few rows, where the schedule's own reads all."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        rows = slice(None, None, 1 + len(schedule) // SAMPLED)
        self.sample = (len(schedule), schedule.kind[rows].tobytes(), schedule.microbatch[rows].tobytes())

    def __hash__(self) -> int:
        return hash(self.sample)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.schedule == other.schedule


@lru_cache(maxsize=16)
def _compiled(key: _Key) -> CompiledOrder:
    return CompiledOrder(order_of(key.schedule))


def _from_fewer(key: _Key, table: Ints, handover: Ints) -> tuple[Ints, Ints] | None:
    """Return starts and ends of a long schedule's actions from a run of few of them; None if they do not repeat."""
    periods, other = likely_periods(order_of(key.schedule)), None
    for period in periods:
        folded = _folded(key, period)
        if folded is None:
            continue
        duration = table.reshape(-1).take(folded.left.code)
        end = folded.left.run_by_stage(table, handover, duration)
        if (found := folded.unfold(duration, end)) is not None:
            return found
        if other is None and (other := folded.other_period(end)) is not None:
            periods.append(other)
    return None


@lru_cache(maxsize=16)
def _folded(key: _Key, period: int) -> Fold | None:
    return fold(order_of(key.schedule), period)


def forget_orders() -> None:
    """Drop the orders that are kept to simulate a schedule again; programs that measure want to start from nothing."""
    _compiled.cache_clear()
    _folded.cache_clear()


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
