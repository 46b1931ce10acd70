"""Feed measured durations to the event engine: does it put the end of the step where it was?

A prediction can be right for wrong reasons, a slow device making up for a missing dependency. With measured durations
only the dependencies are left to be wrong: a bucket leaves when every rank has its gradients and the bucket before it
has arrived, and the optimizer waits for the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from distlab.measure.runs.timed import step_spans
from distlab.measure.runs.training import RankReport
from distlab.trace import Span
from simulator.engine.event_engine import run
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, GraphBuilder


def replay_errors(reports: Sequence[RankReport]) -> list[float]:
    """Return, for every timed step, the relative error of the engine's end of the step, fed with what was measured."""
    errors = []
    for step in range(len(reports[0].step_ns)):
        ranks = [_step_spans(report, step) for report in reports]
        origin = min(span.start_ns for spans in ranks for span in spans)
        measured = max(span.end_ns for spans in ranks for span in spans) - origin
        errors.append(replayed_ns(ranks, origin) / measured - 1.0)
    return errors


def replayed_ns(ranks: Sequence[Sequence[Span]], origin: int) -> int:
    """Return the length of one step by the engine, from each rank's measured spans of it.

    A rank begins when it began; from there only durations count, and what a rank did between spans is lost. Backward is
    cut where a bucket left. A bucket's duration is what was left of it once the last rank had sent it and the bucket
    before had arrived, to where the first rank saw it arrive.
    """
    buckets = [_of_kind(spans, "all_reduce") for spans in ranks]
    graph = GraphBuilder()
    pieces = [_add_passes(graph, rank, spans, origin) for rank, spans in enumerate(ranks)]
    arrived, arrivals = origin, []
    for index in range(len(buckets[0])):
        begin = max([arrived, *(mine[index].start_ns for mine in buckets)])
        end = max(begin, min(mine[index].end_ns for mine in buckets))
        needs = [mine[index] for mine in pieces] + arrivals[-1:]
        arrivals.append(graph.add(0, COMMUNICATION, end - begin, needs=needs))
        arrived = end
    for rank, spans in enumerate(ranks):
        (optimizer,) = _of_kind(spans, "optimizer")
        needs = [pieces[rank][-1], *arrivals[-1:]]
        graph.add(rank, COMPUTE, optimizer.end_ns - optimizer.start_ns, needs=needs)
    return int(run(graph.graph()).end_ns.max())


def _add_passes(graph: GraphBuilder, rank: int, spans: Sequence[Span], origin: int) -> list[int]:
    """Add a rank's forward and its backward, cut where buckets left; return the piece before each cut and the last."""
    (forward,), (backward,) = _of_kind(spans, "F"), _of_kind(spans, "B")
    now = graph.add(rank, COMPUTE, forward.start_ns - origin)
    now = graph.add(rank, COMPUTE, forward.end_ns - forward.start_ns, needs=[now])
    pieces, at = [], backward.start_ns
    for cut in [*(span.start_ns for span in _of_kind(spans, "all_reduce")), backward.end_ns]:
        now = graph.add(rank, COMPUTE, max(0, cut - at), needs=[now])
        pieces.append(now)
        at = max(at, cut)
    return pieces


def _step_spans(report: RankReport, step: int) -> list[Span]:
    return sorted(step_spans(report, step), key=lambda span: span.start_ns)


def _of_kind(spans: Sequence[Span], kind: str) -> list[Span]:
    return [span for span in spans if span.kind == kind]
