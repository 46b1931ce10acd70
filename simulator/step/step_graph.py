"""When everything in a step happens: its passes, messages, exchanges and updates, as one graph of operations.

Each rank's program is added in its order: passes layer by layer, messages to other stages, and what it exchanges (see
`exchanges`), until its update and what follows it. The event engine then says when each operation runs.

No pass waits for gradients that are exchanged in buckets. So where computing and communicating do not slow each other
down and ranks do not share cores, passes and messages are timed first, each pass whole. Of each rank only the end is
laid as a graph: the passes that complete gradients, and what follows. The times are the same, and ranks that end alike
are timed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distlab.plan import Cluster, Contention, Plan
from simulator.engine import event_engine as engine
from simulator.engine.task_graph import COMMUNICATION
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.schedule_arrays import B, F, I, Ints, ScheduleArrays, last_actions
from simulator.stage.stage import Stage
from simulator.stage.step_times import BucketParts, CallParts, Timing, finishing
from simulator.step.exchanges import Buckets, Pass, Programs, Units
from simulator.step.timed import sums_each_pass

SEND_FORWARD, SEND_BACKWARD = COMMUNICATION + 1, COMMUNICATION + 2


def time_step(compiled: CompiledSchedule, stages: Sequence[Stage], plan: Plan, cluster: Cluster) -> Timing:
    """Time the passes, the exchange of gradients and parameters, and the update of a step."""
    if plan.sharding.stage == 3:
        return time_layer_by_layer(compiled, stages, plan, cluster, contention=cluster.contention)
    overlaps = plan.pipeline > 1 or (plan.copies > 1 and plan.gradient_sync in ("bucketed", "overlapped"))
    contention = cluster.contention if overlaps and engine.slows_down(cluster.contention) else None
    cores = None
    if cluster.num_cores is not None and plan.world_size > cluster.num_cores and plan.pipeline > 1:
        # A rank that waits lends its part of the cores to the others.
        cores = engine.SharedCores(cluster.num_cores, plan.world_size // plan.pipeline)
    if contention is None and cores is None and not sums_each_pass(plan):
        return time_whole_passes(compiled, stages, plan, cluster)
    return time_layer_by_layer(compiled, stages, plan, cluster, contention=contention, cores=cores)


def time_layer_by_layer(
    compiled: CompiledSchedule,
    stages: Sequence[Stage],
    plan: Plan,
    cluster: Cluster,
    *,
    contention: Contention | None = None,
    cores: engine.SharedCores | None = None,
) -> Timing:
    """Time a step as one graph, each pass layer by layer.

    Args:
        compiled: the schedule.
        stages: what each stage costs.
        plan: how the step runs.
        cluster: its software.
        contention: how much computing and communicating slow each other down.
        cores: cores that the ranks share.
    """
    order, own, closes = compiled.order, finishing(compiled.order), plan.sharding.stage not in (1, 2)
    programs, num_actions = Programs(stages, order.num_ranks), len(order.kind)
    exchanging = _exchanging(programs, plan, cluster)
    columns = (order.stage, order.kind, order.microbatch, compiled.rank, compiled.needed, compiled.remote)
    actions = list(zip(*(column.tolist() for column in columns), strict=True))
    last, ends = last_actions(order).tolist(), set((order.offsets[1:] - 1).tolist())
    send_ns = _sends_ns(stages).tolist()
    first, done, sent = [0] * num_actions, [0] * num_actions, [-1] * num_actions  # operations of each action
    rows: list[tuple[int, int, int]] = []  # action, layer, operation
    updates = [0] * order.num_ranks
    for action in np.argsort(compiled.level, kind="stable").tolist():  # what an action needs has been added before it
        number, kind, microbatch, rank, needed, remote = actions[action]
        needs = [] if needed < 0 else [sent[needed] if remote and sent[needed] >= 0 else done[needed]]
        each = Pass(number, kind, microbatch, action == last[number])
        layers, done[action] = exchanging.run(each, needs)
        rows += zip([action] * len(layers), each.layers(len(layers)), layers, strict=True)
        first[action] = layers[0]
        if duration := send_ns[number][kind]:
            lane, there = (SEND_FORWARD, number + 1) if kind == F else (SEND_BACKWARD, number - 1)
            sent[action] = programs.graph.add(rank, lane, duration, needs=[done[action]], peer=stages[there].rank)
        if action in ends:
            received = exchanging.exchange(rank, own[rank])
            if closes:
                updates[rank] = exchanging.close(rank, own[rank], received)
            else:  # what the others feel of it
                updates[rank] = programs.update(rank, own[rank], programs.computed[rank], on_host=False)
    start, end = times = engine.run(programs.graph, contention, cores)
    action_end, is_sent = end[done], np.array(sent) >= 0
    at = np.array(sorted(rows, key=lambda row: row[0]), np.int64).reshape(-1, 3)
    timing = Timing(
        order=order,
        start_ns=start[first],
        end_ns=action_end,
        send_start_ns=np.where(is_sent, start[sent], action_end),
        send_end_ns=np.where(is_sent, end[sent], action_end),
        parts=tuple(BucketParts(exchanging.parts[number], start, end) for number in range(len(stages))),
        optimizer=tuple((int(start[update]), int(end[update])) for update in updates),
        called=tuple((CallParts(programs.calls[rank], *times),) for rank in range(order.num_ranks)),
        layers=np.stack([at[:, 0], at[:, 1], start[at[:, 2]], end[at[:, 2]]], axis=1),
    )
    return timing if closes else _close(timing, stages, plan, cluster)


def _exchanging(programs: Programs, plan: Plan, cluster: Cluster) -> Buckets | Units:
    if plan.sharding.stage == 3:
        return Units(programs, plan.sharding, cluster)
    return Buckets(programs, plan.gradient_sync, each_pass=sums_each_pass(plan))


def _sends_ns(stages: Sequence[Stage]) -> Ints:
    """Return the time of the message after each kind of pass of each stage [S, 4]; 0: there is none."""
    sends = np.zeros((len(stages), 4), np.int64)
    sends[:, F] = [stage.send_forward_ns for stage in stages]
    sends[:, B] = sends[:, I] = [stage.send_backward_ns for stage in stages]
    return sends


def _close(timing: Timing, stages: Sequence[Stage], plan: Plan, cluster: Cluster) -> Timing:
    """Add the ends of ranks under sharding stages 1 and 2, in which they disturb nobody: each is a graph of its own."""
    updates, called = [], []
    shown = _shown(stages, plan, cluster, timing.order, timing.start_ns)
    for rank, own in enumerate(timing.finishing):
        programs, now, received = Programs(stages, timing.order.num_ranks), 0, []
        for bucket in timing.buckets_of(rank):
            received.append(programs.compute(rank, bucket.unpack[1] - now))
            now = bucket.unpack[1]
        programs.compute(rank, timing.optimizer[rank][0] - now)
        update = Buckets(programs, plan.gradient_sync).close(rank, own, received, shown[rank])
        times = engine.run(programs.graph)
        updates.append((int(times.start_ns[update]), int(times.end_ns[update])))
        called.append((*timing.called[rank], CallParts(programs.calls[rank], *times)))
    return replace(timing, optimizer=tuple(updates), called=tuple(called))


def _shown(
    stages: Sequence[Stage], plan: Plan, cluster: Cluster, order: ScheduleArrays, start_ns: Ints
) -> tuple[float, ...]:
    """Return the part of each rank's gathers that nothing hides: all, unless they run under the next step's forwards.

    Then stages are gathered in the order in which they begin. A stage's gathers may take until its own first forward,
    and run under it, layer by layer; so what ranks with several stages run before the later ones hides their gathers.
    """
    if not (cluster.software.gathers_ahead and plan.sharding.stage in (1, 2)):
        return (1.0,) * order.num_ranks
    first_ns = np.full(len(stages), np.iinfo(np.int64).max)
    np.minimum.at(first_ns, order.stage[order.kind == F], start_ns[order.kind == F])
    found = []
    for rank in range(order.num_ranks):
        own = sorted((n for n, stage in enumerate(stages) if stage.rank == rank), key=lambda number: first_ns[number])
        gathered = late = 0
        for number in own:
            gathered += sum(bucket.gather.duration_ns for bucket in stages[number].buckets if bucket.gather is not None)
            hidden = int(first_ns[number] - first_ns[own[0]]) + sum(stages[number].forward_ns)
            late = max(late, gathered - hidden)
        found.append(late / gathered if gathered else 0.0)
    return tuple(found)


def time_whole_passes(compiled: CompiledSchedule, stages: Sequence[Stage], plan: Plan, cluster: Cluster) -> Timing:
    """Time a step in which nothing slows anything else down: whole passes first, then how each rank ends."""
    order, last = compiled.order, last_actions(compiled.order)
    totals = np.array([[sum(layers) for layers in stage.passes_ns] for stage in stages], np.int64)
    pass_ns = totals[order.stage, order.kind]
    if plan.gradient_sync == "overlapped":  # what is packed during a pass is a part of it
        pass_ns[last] += [sum([bucket.pack_ns for bucket in stage.buckets]) for stage in stages]
    send_ns = _sends_ns(stages)[order.stage, order.kind]
    end_ns, sent_ns = map(engine.whole_ns, compiled.run_with_wires(pass_ns, send_ns))
    start_ns = end_ns - pass_ns
    kinds, starts, ends = (column[last].tolist() for column in (order.kind, start_ns, end_ns))
    shown = _shown(stages, plan, cluster, order, start_ns)
    parts, updates, called = [BucketParts((), end_ns, end_ns)] * len(stages), [], []
    known: dict[object, _Ending] = {}
    for rank, own in enumerate(finishing(order)):
        begin = starts[own[0]] if own else 0
        passes = [(kinds[n], starts[n] - begin, ends[n] - begin) for n in own]
        costs = [(stages[n].passes_ns[kinds[n]], id(stages[n].buckets), stages[n].optimizer_ns) for n in own]
        alike = (*passes, *costs, shown[rank])
        if alike not in known:
            known[alike] = _Ending(stages, order.num_ranks, rank, own, passes, plan.gradient_sync, shown[rank])
        ending = known[alike]
        start, end = ending.times.start_ns + begin, ending.times.end_ns + begin
        for number, other in zip(own, ending.own, strict=True):
            parts[number] = BucketParts(ending.buckets.parts[other], start, end)
        updates.append((int(start[ending.update]), int(end[ending.update])))
        called.append((CallParts(ending.programs.calls[ending.rank], start, end),))
    return Timing(order, start_ns, end_ns, sent_ns - send_ns, sent_ns, tuple(parts), tuple(updates), tuple(called))


class _Ending:
    """How a rank ends its step: a graph from its first pass that completes gradients on; others take their time."""

    def __init__(
        self,
        stages: Sequence[Stage],
        num_ranks: int,
        rank: int,
        own: tuple[int, ...],
        passes: Sequence[tuple[int, int, int]],
        sync: str,
        shown: float,
    ) -> None:
        """`passes` are the kind, start and end of what completes each own stage, counted from the first one's start."""
        self.rank, self.own, self.programs, now = rank, own, Programs(stages, num_ranks), 0
        self.buckets = Buckets(self.programs, sync)
        for number, (kind, start, end) in zip(own, passes, strict=True):
            self.programs.compute(rank, start - now)
            self.buckets.run(Pass(number, kind, 0, True), ())
            now = end
        self.update = self.buckets.close(rank, own, self.buckets.exchange(rank, own), shown)
        self.times = engine.run(self.programs.graph)
