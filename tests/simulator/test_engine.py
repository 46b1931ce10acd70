"""The event engine: a plain event loop's times, contention, shared cores; and a step of any plan that it runs."""

import heapq
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distlab import plan as plans
from distlab.plan.records import GRADIENT_SYNCS
from distlab.profile import Profile, limit_of
from distlab.profile.findings import FLOOR
from simulator import all_reduce_s, closed_form_bubble, gpt_workload, simulate
from simulator.engine import event_engine as engine
from simulator.engine.event_engine import SharedCores, run
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, Graph
from simulator.step.step_graph import time_layer_by_layer, time_whole_passes
from simulator.step.timed import compile_schedule_of, notes_on
from simulator.units import to_ns
from tests.simulator import sharding_cases as blocks
from tests.simulator.step_cases import EACH, LINK, cluster_of, workload_of

SLOW = plans.Contention(compute_slowdown=1.25, communication_slowdown=1.5)


def random_graph(seed, num_operations, num_ranks):
    generator = np.random.default_rng(seed)
    graph = Graph()
    for operation in range(num_operations):
        count = generator.integers(0, min(3, operation) + 1)
        needs = generator.choice(operation, count, replace=False).tolist() if operation else []
        rank, lane = int(generator.integers(num_ranks)), int(generator.integers(3))
        peer = int(generator.integers(num_ranks)) if lane else -1
        graph.add(rank, lane, int(generator.integers(0, 100)), needs=needs, peer=peer)
    return graph


def plain_event_loop(graph):
    """Events in the order of time: an operation ends, and what then has all it needs starts."""
    lanes = {}
    for operation in range(len(graph)):
        lanes.setdefault((graph.rank[operation], graph.lane[operation]), []).append(operation)
    ready_at = {}
    end, start, events = {}, {}, [(0, -1)]
    while events:
        now, _ = heapq.heappop(events)
        for queue in lanes.values():
            while queue:
                operation = queue[0]
                needs = graph.needs(operation)
                if any(need not in end or end[need] > now for need in needs):
                    break
                ready = max((end[n] for n in needs), default=0)
                ready = max(ready, ready_at.get(id(queue), 0))
                queue.pop(0)
                start[operation], end[operation] = ready, ready + graph.duration_ns[operation]
                ready_at[id(queue)] = end[operation]
                heapq.heappush(events, (end[operation], operation))
    order = range(len(graph))
    return np.array([start[o] for o in order]), np.array([end[o] for o in order])


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 4))
def test_equals_a_plain_event_loop_bit_for_bit(seed, num_operations, num_ranks):
    graph = random_graph(seed, num_operations, num_ranks)
    times = engine.run(graph)
    start, end = plain_event_loop(graph)
    assert np.array_equal(times.start_ns, start)
    assert np.array_equal(times.end_ns, end)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 4), st.floats(1, 4), st.floats(1, 4))
def test_lanes_needs_and_bounds_hold_under_contention(seed, num_operations, num_ranks, compute, communication):
    graph = random_graph(seed, num_operations, num_ranks)
    start, end = engine.run(graph, plans.Contention(compute, communication))
    last, busiest = {}, Counter()
    for operation in range(len(graph)):
        lane = (graph.rank[operation], graph.lane[operation])
        assert start[operation] >= last.get(lane, 0)  # no overlap, first in first out
        last[lane] = end[operation]
        busiest[lane] += graph.duration_ns[operation]
        for need in graph.needs(operation):
            assert start[operation] >= end[need]
        taken, alone = end[operation] - start[operation], graph.duration_ns[operation]
        slowest = compute if graph.lane[operation] == COMPUTE else communication
        assert alone <= taken <= np.ceil(alone * (round(slowest * 1000) / 1000)) + 1
    assert end.max() >= max(busiest.values())


def times_of(*operations, contention=None, cores=None):
    """Return the starts and the ends of operations, each (rank, lane, duration), and what it needs or its peer."""
    graph = Graph()
    for rank, lane, duration, *more in operations:
        graph.add(rank, lane, duration, **(more[0] if more else {}))
    times = engine.run(graph, contention, cores)
    return times.start_ns.tolist(), times.end_ns.tolist()


def test_contention_slows_both_sides_only_while_both_are_busy_and_a_different_rank_only_where_it_is_the_peer():
    starts, ends = times_of((0, COMPUTE, 1000), (0, COMMUNICATION, 400), contention=SLOW)
    assert starts == [0, 0]
    assert ends == [600 + (1000 - 480), 600]  # 400 at 1.5 times; in 600 ns it did 600 / 1.25 = 480
    computing = [(rank, COMPUTE, 1000) for rank in range(3)]
    assert times_of(*computing, (0, COMMUNICATION, 2000, {"peer": 1}), contention=SLOW)[1][:3] == [1250, 1250, 1000]
    assert times_of((0, COMPUTE, 10), (0, COMMUNICATION, 100), contention=SLOW)[1][0] == 13  # 12.5, rounded up
    assert times_of() == times_of(contention=SLOW) == ([], [])


def test_a_message_takes_no_core_and_contention_and_shared_cores_multiply():
    rows = (0, COMMUNICATION, 50), (0, COMPUTE, 100), (1, COMPUTE, 40, {"needs": [0]})
    assert times_of(*rows, cores=SharedCores(1))[1] == [50, 50, 70]  # alone at twice the speed, then the other one
    rows = (0, COMPUTE, 100), (1, COMPUTE, 10), (0, COMMUNICATION, 1000)
    both = {"contention": plans.Contention(2.0, 1.0), "cores": SharedCores(1)}
    assert times_of(*rows, **both)[1] == [105, 10, 1000]  # 10 ns at half speed: 5 done; 95 at half of twice the speed


GPT = gpt_workload(hidden_size=32, num_layers=6, num_heads=4, sequence_length=64, vocab_size=96)


def ends(*durations, cores):
    """Return when computing ranks, each with one operation, are done."""
    return times_of(*((rank, COMPUTE, duration) for rank, duration in enumerate(durations)), cores=cores)[1]


def shares(plan, num_cores):
    return simulate(GPT, replace(cluster_of(8), num_cores=num_cores), plan)


def test_a_rank_that_is_left_gets_the_cores_of_those_that_are_done_but_one_at_most():
    """Of four ranks on two cores each has half of one; two that are left have one each, and one has no more."""
    assert ends(100, 60, cores=SharedCores(1)) == [80, 60]  # 40 are left at 60, and go twice as fast
    assert ends(100, 100, 200, 300, cores=SharedCores(2)) == [100, 100, 150, 200]
    assert ends(100, 200, cores=SharedCores(2, ranks_each=2)) == [100, 150]  # the same ranks, seen two by two
    assert ends(100, 200, cores=SharedCores(3, ranks_each=2)) == [100, 175]  # 2/3 of a core each, then one: 1.5 times


def test_one_core_is_never_idle_and_does_all_the_work():
    """The end follows from the sum of the work, whatever waits for what, but for ends that are rounded up."""
    generator = np.random.default_rng(1)
    num_ranks, count = int(generator.integers(1, 7)), 40
    graph = Graph()
    for operation in range(count):
        needs = generator.choice(operation, min(2, operation), replace=False).tolist()
        graph.add(int(generator.integers(num_ranks)), COMPUTE, int(generator.integers(10**6)), needs=needs)
    # Where the last rank has nothing to do the graph has one rank fewer, and a core has more for each of the others.
    busy = 1 + max(graph.rank)
    end = engine.run(graph, None, SharedCores(1)).end_ns.max()
    assert sum(graph.duration_ns) / busy <= end <= sum(graph.duration_ns) / busy + count


@pytest.mark.parametrize(
    ("plan", "schedule"), [(plans.Plan(pipeline=2), "zb_h1"), (plans.Plan(pipeline=2, tensor=2, data=2), "one_f_one_b")]
)
def test_a_pipeline_of_two_ends_when_its_work_is_done(plan, schedule):
    """Two places and half of the cores for each: bubbles are gone as time, and seen where one place computes alone."""
    plan = replace(plan, num_microbatches=4, schedule=schedule, gradient_sync="flat")
    apart, together = shares(plan, None), shares(plan, plan.world_size // 2)
    syncs = [sync for stage in apart.stages for sync in stage.buckets]
    work_ns = int((apart.timing.end_ns - apart.timing.start_ns).sum())
    work_ns += sum(sync.pack_ns + sync.unpack_ns for sync in syncs) + sum(each.optimizer_ns for each in apart.stages)
    waits_ns = sum(stage.send_forward_ns + stage.send_backward_ns for stage in apart.stages) * plan.num_microbatches
    waits_ns += sum(sync.duration_ns for sync in syncs)  # nobody computes beside them at the very most
    rounding_ns = 1000
    assert work_ns / 2 - rounding_ns <= together.duration_s * 1e9 <= work_ns / 2 + waits_ns + rounding_ns
    assert together.duration_s < apart.duration_s
    assert together.trace.duration_s == together.layer_trace.duration_s == together.duration_s
    assert together.sent_bytes_by_axis == apart.sent_bytes_by_axis


@pytest.mark.parametrize("plan", [plans.Plan(tensor=2, context=2), plans.Plan(data=4, sharding=plans.Sharding(3))])
def test_ranks_that_all_do_the_same_share_cores_evenly_from_start_to_end(plan):
    assert shares(plan, 1).duration_s == shares(plan, None).duration_s


def random_case(seed):
    generator = np.random.default_rng(seed)
    draw, layers = generator.integers, []
    for i in range(draw(1, 8)):
        sizes = tuple(draw(1, 3000, draw(0, 4)).tolist())
        works = [plans.Work(float(draw(0, 10**6)), float(draw(0, 10**5)), 1) for _ in range(3)]
        layers.append(plans.Layer(f"layer {i}", sizes, *works, int(draw(0, 1000)), int(draw(0, 5000))))
    workload = plans.Workload("random", tuple(layers), 4, plans.Work(0, 1e5, 4))
    per_node = int(generator.choice([1, 2, 4, 8]))
    contention = plans.Contention() if draw(2) else plans.Contention(*(1 + generator.random(2)))
    device = plans.Device("d", 1e9, 1e9, 1e9)
    links = [plans.Link("l", (plans.Protocol(1e-6, 10.0 ** draw(7, 11)),)) for _ in range(2)]
    cluster = plans.Cluster("c", device, per_node * 4, per_node, *links, contention)
    schedule, pipeline, data = str(generator.choice([*plans.SCHEDULES])), int(draw(1, 6)), int(draw(1, 6))
    codec = EACH[draw(len(EACH))] if data > 1 and schedule == "one_f_one_b" else None
    stages = {"v": 2, "loop": int(draw(1, 4))}.get(plans.SCHEDULES[schedule].placement, 1)
    sync, *buckets = str(generator.choice(GRADIENT_SYNCS)), int(draw(1, 20000)), int(draw(1, 5000))
    own = (data, pipeline, int(draw(1, 7)), schedule, sync, *buckets)
    return workload, cluster, plans.Plan(*own, compression=codec, stages_per_rank=stages)


def test_one_rank_is_the_sum_of_its_work():
    step = simulate(blocks.workload_of([1, 2, 3]), blocks.cluster_of(1), plans.Plan())
    assert step.duration_s == pytest.approx(0.006 + 0.012 + 0.0008)
    assert step.bubble_fraction == step.exposed_communication_s == 0
    assert step.sent_bytes_per_rank == (0,)
    parts = [("forward", "F"), ("backward", "B"), ("optimizer", "optimizer")]
    assert [(span.name, span.kind) for span in step.trace] == parts


def test_overlapped_buckets_start_when_ready_and_one_after_the_other():
    workload = workload_of(*[((50_000,), (10,))] * 4)
    step = simulate(workload, cluster_of(4), plans.Plan(data=4, bucket_bytes=1, first_bucket_bytes=1))
    spans = [span for span in step.trace if span.kind == "all_reduce" and span.rank == 0]
    buckets = plans.assign_buckets([size * 4 for layer in workload.layers for size in layer.parameter_sizes], 1, 1)
    assert [span.num_bytes for span in spans] == [bucket.num_bytes for bucket in buckets]
    free, ready = 0, to_ns(0.004)
    copies = iter(step.stages[0].buckets)
    for layer in reversed(range(4)):
        ready += step.stages[0].backward_ns[layer]
        for _ in range(2):
            sync, span = next(copies), spans.pop(0)
            ready += sync.pack_ns
            assert span.start_ns == max(ready, free)
            free = span.start_ns + to_ns(all_reduce_s(sync.num_bytes, 4, LINK))
            assert span.end_ns == free
    assert next(span for span in step.trace if span.kind == "optimizer").start_ns == max(free, ready)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_whole_passes_equal_passes_run_layer_by_layer(seed):
    """Where nothing is slowed down, the two ways to lay a step give the same times."""
    workload, cluster, plan = random_case(seed)
    cluster = replace(cluster, contention=plans.Contention(), num_devices=cluster.devices_per_node * 32)
    if plan.pipeline * plan.stages_per_rank > len(workload.layers):
        return
    plan = replace(plan, sharding=plans.Sharding(seed % 2 if plan.compression is None else 0))
    step = simulate(workload, cluster, plan)
    how = (compile_schedule_of(plan, None, step.stages), step.stages, plan, cluster)
    whole, in_layers = time_whole_passes(*how), time_layer_by_layer(*how)
    for name in ("start_ns", "end_ns", "send_start_ns", "send_end_ns"):
        assert np.array_equal(getattr(whole, name), getattr(in_layers, name)), name
    assert whole.layers is None
    assert (np.diff(in_layers.rows[:, 0]) >= 0).all()
    assert (whole.buckets, whole.optimizer) == (in_layers.buckets, in_layers.optimizer)
    assert whole.calls == in_layers.calls


def test_a_slow_link_queues_messages_in_order():
    link = plans.Link("slow", (plans.Protocol(0.0, 1e4),))  # 100 bytes: 10 ms, longer than a pass
    plan = plans.Plan(pipeline=2, num_microbatches=4, schedule="gpipe")
    step = simulate(blocks.workload_of([1, 1]), blocks.cluster_of(2, intra=link), plan)
    sends = [s for s in step.trace if s.kind == "send" and s.rank == 0]
    assert [s.end_ns - s.start_ns for s in sends] == [10_000_000] * 4
    assert sends[-1].end_ns == 41_000_000


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), [("gpipe", 3, 2), ("one_f_one_b", 4, 16)])
def test_free_communication_gives_the_textbook_bubble(schedule, stages, microbatches):
    machine = blocks.cluster_of(stages, intra=plans.Link("free", (plans.Protocol(0.0, 1e30),)))
    workload = replace(blocks.workload_of([1.0] * stages), optimizer=plans.Work())
    step = simulate(workload, machine, plans.Plan(1, stages, microbatches, schedule=schedule))
    assert step.bubble_fraction == pytest.approx(closed_form_bubble(stages, microbatches), abs=1e-9)


@pytest.mark.parametrize("samples_per_s", [None, 1e3, 140.0, 110.0, 7.0])
@pytest.mark.parametrize("num_ahead", [1, 4])
def test_a_loader_that_works_ahead_limits_many_steps_as_the_engine_says(samples_per_s, num_ahead):
    workload = replace(workload_of(*[((50_000,), (10,))] * 4), samples=2)
    cluster, plan = cluster_of(2), plans.Plan(data=2, num_microbatches=3)
    alone = simulate(workload, cluster, plan)
    slow = replace(cluster, device=replace(cluster.device, loader_samples_per_s=samples_per_s))
    step, graph, steps, loads = simulate(workload, slow, plan), Graph(), [], []
    for number in range(200):
        needs = steps[number - num_ahead - 1 : number - num_ahead] if number > num_ahead else []  # a batch was taken
        loads.append(graph.add(0, 1, to_ns(step.loading_s), needs=needs))
        steps.append(graph.add(0, 0, to_ns(alone.steady_s), needs=[loads[-1]]))
    ends = run(graph).end_ns[steps]
    expected_s = (ends[-1] - ends[99]) / 100 / 1e9
    assert step.steady_s == pytest.approx(expected_s, rel=1e-6)
    assert step.duration_s - alone.duration_s == pytest.approx(step.loader_wait_s)
    assert step.trace.duration_s == pytest.approx(max(step.duration_s, step.loading_s))
    spans = [span for span in step.trace if span.lane == "loader"]
    assert [span.duration_s for span in spans] == ([] if samples_per_s is None else [pytest.approx(step.loading_s)] * 2)
    limit = limit_of(Profile.of(step.trace))  # a wait for samples looks as a measured one does
    assert limit.loader == pytest.approx(step.loader_wait_s / step.duration_s)
    assert (limit.what == "loader") == (limit.loader >= FLOOR)
    noted = [note for note in notes_on(plan, loader_wait_s=step.loader_wait_s) if "loader limits" in note]
    assert len(noted) == (step.loader_wait_s > 0) == (samples_per_s in (110.0, 7.0))
