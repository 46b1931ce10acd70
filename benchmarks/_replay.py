"""Feed measured durations to the simulator's engines: do they put the end of a step where it was?

A prediction can be right for wrong reasons, a slow device making up for a missing dependency. With measured durations
only dependencies can be wrong.

- Of replicas: a bucket leaves when every rank has its gradients and the bucket before it has arrived, and the optimizer
  waits for the last one.
- Of a pipeline: an action begins when the rank's action before it has ended and when what it needs has arrived. What a
  rank does between two actions counts to the first; waiting does not. How long a message took is seen where a rank
  waited for it. A message that lay ready says only that it was no later, so each message takes the middle time of those
  of its direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.measure import RankReport
from distlab.plan import Schedule
from distlab.trace import Span, Trace
from simulator import CompiledSchedule, arrays_of
from simulator.engine.event_engine import run
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, Graph
from simulator.pipeline.schedule_arrays import LETTERS, F

Ints = NDArray[np.int64]

WAITED_NS = 20_000  # a receive that takes less found its message there


def replica_replay_errors(reports: Sequence[RankReport]) -> list[float]:
    """Return, for every timed step, the relative error of the engine's end of the step, fed with what was measured."""
    errors = []
    for step in range(len(reports[0].step_ns)):
        ranks = [sorted(report.step_trace(step), key=lambda span: span.start_ns) for report in reports]
        origin = min(span.start_ns for spans in ranks for span in spans)
        measured = max(span.end_ns for spans in ranks for span in spans) - origin
        errors.append(replayed_ns(ranks, origin) / measured - 1.0)
    return errors


def replayed_ns(ranks: Sequence[Sequence[Span]], origin: int) -> int:
    """Return the length of one step by the engine, from each rank's measured spans of it.

    A rank begins when it began; from there only durations count, and what a rank did between spans is lost. Backward is
    cut where a bucket left. A bucket's duration begins when the last rank has sent it and the bucket before has
    arrived, and ends where the first rank saw it arrive.
    """
    buckets = [_of_kind(spans, "all_reduce") for spans in ranks]
    graph = Graph()
    cuts = [_add_passes(graph, rank, spans, origin) for rank, spans in enumerate(ranks)]
    arrived, arrivals = origin, []
    for index in range(len(buckets[0])):
        begin = max([arrived, *(mine[index].start_ns for mine in buckets)])
        end = max(begin, min(mine[index].end_ns for mine in buckets))
        needs = [mine[index] for mine in cuts] + arrivals[-1:]
        arrivals.append(graph.add(0, COMMUNICATION, end - begin, needs=needs))
        arrived = end
    for rank, spans in enumerate(ranks):
        (optimizer,) = _of_kind(spans, "optimizer")
        needs = [cuts[rank][-1], *arrivals[-1:]]
        graph.add(rank, COMPUTE, optimizer.end_ns - optimizer.start_ns, needs=needs)
    return int(run(graph).end_ns.max())


def _add_passes(graph: Graph, rank: int, spans: Sequence[Span], origin: int) -> list[int]:
    """Add a rank's forward and its backward, cut where buckets left; return the task before each cut and the last."""
    (forward,), (backward,) = _of_kind(spans, "F"), _of_kind(spans, "B")
    now = graph.add(rank, COMPUTE, forward.start_ns - origin)
    now = graph.add(rank, COMPUTE, forward.end_ns - forward.start_ns, needs=[now])
    tasks, at = [], backward.start_ns
    for cut in [*(span.start_ns for span in _of_kind(spans, "all_reduce")), backward.end_ns]:
        now = graph.add(rank, COMPUTE, max(0, cut - at), needs=[now])
        tasks.append(now)
        at = max(at, cut)
    return tasks


def _of_kind(spans: Sequence[Span], kind: str) -> list[Span]:
    return [span for span in spans if span.kind == kind]


class _Seen(NamedTuple):
    """One step, one entry per action: when its rank began it, when the rank went on, and whether it had waited."""

    begin_ns: Ints
    end_ns: Ints
    waited: NDArray[np.bool_]


def pipeline_replay_errors(schedule: Schedule, steps: Sequence[Sequence[Trace]]) -> list[float]:
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
    """Return, for each action, the middle time of its direction's messages, from the end of what it needs."""
    order, remote = compiled.order, compiled.remote
    passed = np.zeros(len(order.kind), np.int64)
    passed[remote] = seen.begin_ns[remote] - seen.end_ns[compiled.needed[remote]]
    message = np.zeros_like(passed)
    for direction in (order.kind == F, order.kind != F):
        measured = passed[remote & direction & seen.waited]
        if len(measured):
            message[remote & direction] = max(0, int(np.median(measured)))  # none arrives before it was made
    return message
