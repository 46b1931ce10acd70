"""The time of a round of DiLoCo: H steps of each replica, and the fragments that meet in them."""

from __future__ import annotations

from typing import NamedTuple

from distlab.plan import Cluster, Plan, Work, Workload
from distlab.plan.require import require, require_count
from distlab.trace import Span, Trace
from simulator.hardware.cost import compute_s
from simulator.hardware.rank_layout import group_of
from simulator.step.simulate import NOTHING_MEASURED, Measured, simulate
from simulator.units import to_ns

PASSES_BEFORE, PASSES_AFTER = 7, 14  # over a fragment: pack, subtract, divide; look, outer step, copy back


class LocalRound(NamedTuple):
    """A round between many equal ones.

    Attributes:
        step_s: mean time of a step, its share of the meetings with it.
        inner_s: time of a step by itself.
        exposed_s: what replicas wait in the round.
        trace: of the round, on all ranks.
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
    measured: Measured = NOTHING_MEASURED,
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
        measured: links of the meetings, and what `simulate` takes.

    Raises:
        ValueError: a number is out of range, or the cluster has too few ranks.
    """
    require_count("local_sgd_round", num_replicas=num_replicas, every=every, fragments=fragments)
    fits = fragments <= every > delay >= 0
    require(fits, f"{fragments} fragments and a delay of {delay} do not fit into every={every} steps; pass fewer")
    alone = simulate(workload, cluster, inner or Plan(1), measured=measured)
    step_ns, size = to_ns(alone.duration_s), alone.plan.world_size
    ranks = range(0, num_replicas * size, size)
    num_bytes = workload.gradient_bytes / fragments
    sent_ns = group_of(cluster, ranks, measured.links).exchange_ns("all_reduce", num_bytes) if num_replicas > 1 else 0
    passes = [Work(memory_bytes=count * num_bytes) for count in (PASSES_BEFORE, PASSES_AFTER)]
    before_ns, after_ns = (to_ns(compute_s(work, cluster.device)) for work in passes)
    dues = [every * (number + 1) // fragments for number in range(fragments)]
    now = wire_ns = begin_ns = waited_ns = 0
    spans: list[Span] = []
    under_way: list[tuple[int, int]] = []  # the step at which a fragment is waited for, and when it is there

    def take(length_ns: int, name: str, kind: str) -> int:
        spans.extend(Span(rank, "compute", name, kind, now, now + length_ns) for rank in ranks)
        return now + length_ns

    for step in range(1, 2 * every + 1):  # the second round is between equal ones
        if step == every + 1:
            begin_ns, waited_ns = now, 0
        inside = [span._replace(start_ns=now + span.start_ns, end_ns=now + span.end_ns) for span in alone.trace]
        spans += [span._replace(rank=first + span.rank) for first in ranks for span in inside]
        now += step_ns
        for number in [number for number, due in enumerate(dues) if step % every == due % every]:
            now = take(before_ns, "changes", "copy")
            start_ns, wire_ns = max(now, wire_ns), max(now, wire_ns) + sent_ns
            under_way.append((step + delay, wire_ns))
            name = f"changes of fragment {number}"
            spans += [Span(r, "communication", name, "all_reduce", start_ns, wire_ns, round(num_bytes)) for r in ranks]
        while under_way and under_way[0][0] <= step:
            wait_ns = max(0, under_way.pop(0)[1] - now)
            waited_ns, now = waited_ns + wait_ns, take(wait_ns, "synchronize", "wait")
            now = take(after_ns, "outer step", "optimizer")
    cut = (one._replace(start_ns=max(one.start_ns, begin_ns), end_ns=min(one.end_ns, now)) for one in spans)
    trace = Trace.from_spans(one for one in cut if one.end_ns > one.start_ns).shifted(-begin_ns)
    return LocalRound((now - begin_ns) / every / 1e9, step_ns / 1e9, waited_ns / 1e9, trace)
