"""One moment of a schedule in words: what each rank does, and which rank an idle one waits for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distlab.trace import Trace
from simulator.units import format_s, name_ranks
from simulator.viz.schedules.run import ScheduleRun

MAX_MOMENTS = 200  # few enough to step through, and from 1,000 actions on always as many: the clock keeps its range
ALL_RANKS = 8  # up to this many ranks, each is described by itself
SOME_RANKS = 3


def moments_of(trace: Trace) -> NDArray[np.int64]:
    """Return the times in ns at which something starts or ends, at most MAX_MOMENTS of them, spread evenly."""
    if len(trace) > 100 * MAX_MOMENTS:
        return np.linspace(0, trace.end_ns.max(), MAX_MOMENTS + 1).astype(np.int64)
    times = np.unique(np.concatenate([trace.start_ns, trace.end_ns]))
    if len(times) > MAX_MOMENTS + 1:
        times = times[np.linspace(0, len(times) - 1, MAX_MOMENTS + 1).round().astype(np.int64)]
    return times


def tell_moment(runs: Sequence[ScheduleRun], at_s: float) -> str:
    """Say what each rank of each schedule does at a time."""
    return " ".join(describe_moment(run, at_s) for run in runs)


def describe_moment(run: ScheduleRun, at_s: float) -> str:
    """Say what each rank does at a time, and for whom an idle one waits; of many ranks only some."""
    trace, at_ns = run.trace, round(at_s * 1e9)
    offsets = np.searchsorted(trace.rank, np.arange(run.schedule.num_ranks + 1))
    busy, idle, done = [], [], []
    for rank in range(run.schedule.num_ranks):
        first, stop = int(offsets[rank]), int(offsets[rank + 1])
        after = first + int(np.searchsorted(trace.start_ns[first:stop], at_ns, side="right"))
        if after > first and trace.end_ns[after - 1] > at_ns:
            busy.append((rank, f"runs {_name(trace, after - 1)}"))
        elif after < stop:
            idle.append((rank, after))
        else:
            done.append(rank)
    many = run.schedule.num_ranks > ALL_RANKS
    told = idle[:SOME_RANKS] if many else idle
    waits = [(rank, _wait(run, row, at_ns)) for rank, row in told]
    parts = [f"{len(busy)} of {run.schedule.num_ranks} ranks work"] if many else []
    parts += [f"rank {rank} {what}" for rank, what in sorted(waits + ([] if many else busy))]
    if len(told) < len(idle):
        parts.append(f"{len(idle) - len(told)} more wait")
    if done:
        parts.append(
            f"{name_ranks(done) if len(done) <= ALL_RANKS else f'{len(done)} ranks'} "
            f"{'is' if len(done) == 1 else 'are'} done"
        )
    return f"At {format_s(at_s)}, {run.name}: {'; '.join(parts)}."


def _wait(run: ScheduleRun, row: int, at_ns: int) -> str:
    """Say what the idle rank's next action needs, and where that is."""
    trace, name = run.trace, _name(run.trace, row)
    forward = trace.words[trace.kind[row]] == "F"
    stage = int(trace.stage[row]) + (-1 if forward else 1)
    kinds = ("F",) if forward else ("B", "I")
    maker = np.flatnonzero(
        (trace.stage == stage) & (trace.microbatch == trace.microbatch[row]) & trace.is_word("kind", *kinds)
    )
    if not maker.size:  # the first stage's forward pass, the last one's backward pass: they need no message
        return f"is about to run {name}"
    needed = int(maker[0])
    source = f"{_name(trace, needed)} of rank {trace.rank[needed]}"
    return f"waits for {source}" + (", which is on its way" if trace.end_ns[needed] <= at_ns else "")


def _name(trace: Trace, row: int) -> str:
    return f"{trace.stage[row]}{trace.words[trace.kind[row]]}{trace.microbatch[row]}"
