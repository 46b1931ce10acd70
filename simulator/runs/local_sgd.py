"""The time of a round of DiLoCo: H steps of each replica, and the fragments that meet in them."""

from __future__ import annotations

from typing import NamedTuple

from distlab.plan import Cluster, Plan, Work, Workload
from distlab.plan.require import require, require_count
from distlab.trace import Span, Trace
from simulator.engine.event_engine import run
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, Graph
from simulator.hardware.cost import compute_s
from simulator.hardware.rank_layout import group_of
from simulator.step.result import Step
from simulator.step.simulate import simulate
from simulator.units import to_ns

STEP = "step"
PASSES_BEFORE, PASSES_AFTER = 7, 14  # over a fragment: pack, subtract, divide; look, outer step, copy back


class LocalRound(NamedTuple):
    """A round between many equal ones.

    Attributes:
        step_s: mean time of a step, its share of the meetings with it.
        inner_s: time of a step by itself.
        exposed_s: what replicas wait in the round.
        trace: of the round, on all ranks; it begins where the fragment that left last has arrived.
    """

    step_s: float
    inner_s: float
    exposed_s: float
    trace: Trace


def local_sgd_round(
    workload: Workload,
    cluster: Cluster,
    num_replicas: int,
    *,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    inner: Plan | None = None,
) -> LocalRound:
    """Simulate a round: a fragment leaves at the end of its step, and is waited for `delay` steps later.

    Fragments have equal bytes, and share one wire in the order in which they leave. Computing beside an exchange costs
    nothing here.

    Args:
        workload: of one replica.
        cluster: the ranks of replica r begin where those of r - 1 end.
        num_replicas: how many meet.
        every: H.
        fragments: that meet at steps of their own.
        delay: steps from a fragment's leaving to the wait for it.
        inner: how a replica's own ranks work; one rank by default.

    Raises:
        ValueError: a number is out of range, or the cluster has too few ranks.
    """
    require_count("local_sgd_round", num_replicas=num_replicas, every=every, fragments=fragments)
    fits = fragments <= every > delay >= 0
    require(fits, f"{fragments} fragments and a delay of {delay} do not fit into every={every} steps; pass fewer")
    alone = simulate(workload, cluster, inner or Plan(1))
    step_ns, size = to_ns(alone.duration_s), alone.plan.world_size
    ranks = range(0, num_replicas * size, size)
    few = f"{num_replicas} replicas of {size} ranks do not fit into {cluster.name}, which has {cluster.num_devices}"
    require(ranks.stop <= cluster.num_devices, f"{few}; pass fewer, or more devices")
    num_bytes = workload.gradient_bytes / fragments
    sent_ns = group_of(cluster, ranks).exchange_ns("all_reduce", num_bytes) if num_replicas > 1 else 0
    passes = [Work(memory_bytes=count * num_bytes) for count in (PASSES_BEFORE, PASSES_AFTER)]
    before_ns, after_ns = (to_ns(compute_s(work, cluster.device)) for work in passes)
    dues = [every * (number + 1) // fragments for number in range(fragments)]
    graph, rows, under_way, begin = Graph(), [], [], 0

    def add(lane: int, name: str, kind: str, length_ns: int, *needs: int) -> int:
        rows.append((("compute", "communication")[lane], name, kind))
        return graph.add(0, lane, length_ns, needs=needs)

    for step in range(1, 2 * every + delay + 1):  # the second round is between equal ones
        begin = len(rows) if step == every + delay + 1 else begin
        add(COMPUTE, STEP, "F", step_ns)
        for number in [number for number, due in enumerate(dues) if step % every == due % every]:
            ready = add(COMPUTE, "changes", "copy", before_ns)
            name = f"changes of fragment {number}"
            under_way.append((step + delay, add(COMMUNICATION, name, "all_reduce", sent_ns, ready)))
        while under_way and under_way[0][0] <= step:
            add(COMPUTE, "outer step", "optimizer", after_ns, under_way.pop(0)[1])
    trace = _trace(graph, rows, begin, round(num_bytes))
    busy_ns = sum(one.end_ns - one.start_ns for one in trace if one.lane == "compute")
    waited_s = trace.duration_s - busy_ns / 1e9
    return LocalRound(trace.duration_s / every, step_ns / 1e9, waited_s, _on_all(trace, alone, ranks))


def _trace(graph: Graph, rows: list[tuple[str, str, str]], begin: int, num_bytes: int) -> Trace:
    """Return what one replica does from an operation on, until it is done with all: what travels on is cut there."""
    times = run(graph)
    start, end = times.start_ns.tolist(), times.end_ns.tolist()
    first, last = start[begin], max(end[row] for row, (lane, *_) in enumerate(rows) if lane == "compute")
    sent = {"compute": 0, "communication": num_bytes}
    found = [
        Span(0, *row, max(b, first), min(e, last), sent[row[0]]) for row, b, e in zip(rows, start, end, strict=True)
    ]
    return Trace.from_spans(one for one in found if one.end_ns > one.start_ns).shifted(-first)


def _on_all(trace: Trace, alone: Step, ranks: range) -> Trace:
    """Draw the inner step in the place of each step, and all of it on every replica."""
    inside = [moved for one in trace if one.name == STEP for moved in alone.trace.shifted(one.start_ns)]
    spans = inside + [one for one in trace if one.name != STEP]
    return Trace.from_spans(one._replace(rank=first + one.rank) for first in ranks for one in spans)
