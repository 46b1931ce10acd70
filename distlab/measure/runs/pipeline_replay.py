"""Feed a pipeline's measured durations to the engine: does it put the end of the step where it was?

Only dependencies are left to be wrong: an action begins when the rank's action before it has ended and when what it
needs has arrived. What a rank does between two actions counts to the first, waiting apart. How long a message took is
seen where a rank waited for it; each message takes the middle time of those of its direction, since one that lay ready
when it was wanted says only that it was no later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan import Schedule
from distlab.trace import Trace
from simulator import CompiledSchedule, arrays_of
from simulator.pipeline.schedule_arrays import LETTERS, F

Ints = NDArray[np.int64]

WAITED_NS = 20_000  # a receive that takes less found its message there


class _Seen(NamedTuple):
    """One step, an entry an action: when its rank began to work on it, when the rank went on, and if it had waited."""

    begin_ns: Ints
    end_ns: Ints
    waited: NDArray[np.bool_]


def replay_errors(schedule: Schedule, steps: Sequence[Sequence[Trace]]) -> list[float]:
    """Return, for every step, the relative error of the engine's end of it.

    Args:
        schedule: what the ranks ran.
        steps: of each step, what each rank did, rank 0 first.

    Raises:
        ValueError: the trace of a rank lacks an action of the schedule.
    """
    compiled = CompiledSchedule(arrays_of(schedule))
    return [_replay_error(compiled, step) for step in steps]


def _replay_error(compiled: CompiledSchedule, ranks: Sequence[Trace]) -> float:
    offsets = compiled.order.offsets
    origin = min(int(trace.start_ns.min()) for trace in ranks)
    ends_ns = [int(trace.end_ns.max()) for trace in ranks]
    seen = _look_up(compiled, ranks)
    duration = seen.end_ns - seen.begin_ns
    first = offsets[:-1][compiled.needed[offsets[:-1]] < 0]  # the others begin when their message arrives
    duration[first] += seen.begin_ns[first] - origin
    ends = compiled.run(duration, _message_ns(compiled, seen))
    replayed = max(
        int(ends[stop - 1]) + rank_end - int(seen.end_ns[stop - 1])
        for rank_end, stop in zip(ends_ns, offsets[1:].tolist(), strict=True)
    )
    return replayed / (max(ends_ns) - origin) - 1.0


def _look_up(compiled: CompiledSchedule, ranks: Sequence[Trace]) -> _Seen:
    """Find each action of the order in its rank's trace, with the receive that came before it, if there was one."""
    order = compiled.order
    begin, end = np.zeros(len(order.kind), np.int64), np.zeros(len(order.kind), np.int64)
    waited = np.zeros(len(order.kind), bool)
    for rank, trace in enumerate(ranks):
        computed = {span.name: span for span in trace if span.lane == "compute"}
        received = {(span.stage, span.microbatch, span.kind): span for span in trace if span.lane == "receive"}
        first, stop = int(order.offsets[rank]), int(order.offsets[rank + 1])
        work_ends = 0
        for action in range(stop - 1, first - 1, -1):
            stage, microbatch = int(order.stage[action]), int(order.microbatch[action])
            name = f"{stage}{LETTERS[order.kind[action]]}{microbatch}"
            if name not in computed:
                raise ValueError(f"rank {rank}: its trace has no {name}; pass the spans of one whole step")
            begin[action] = computed[name].start_ns
            end[action] = max(computed[name].end_ns, work_ends)
            work_ends = begin[action]
            wait = received.get((stage, microbatch, "RECV_F" if order.kind[action] == F else "RECV_B"))
            if wait is not None and compiled.remote[action]:
                begin[action], work_ends = wait.end_ns, wait.start_ns
                waited[action] = wait.end_ns - wait.start_ns > WAITED_NS
    return _Seen(begin, end, waited)


def _message_ns(compiled: CompiledSchedule, seen: _Seen) -> Ints:
    """Return, an action, the middle time of its direction's messages, counted from the end of what it needs."""
    order, remote = compiled.order, compiled.remote
    passed = np.zeros(len(order.kind), np.int64)
    passed[remote] = seen.begin_ns[remote] - seen.end_ns[compiled.needed[remote]]
    message = np.zeros_like(passed)
    for direction in (order.kind == F, order.kind != F):
        measured = passed[remote & direction & seen.waited]
        if len(measured):
            message[remote & direction] = max(0, int(np.median(measured)))  # none arrives before it was made
    return message
