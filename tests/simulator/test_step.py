from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distlab.plan import (
    SCHEDULES,
    Cluster,
    Contention,
    Device,
    Layer,
    Link,
    Plan,
    Protocol,
    Sharding,
    Work,
    Workload,
    assign_buckets,
)
from distlab.plan.records import GRADIENT_SYNCS
from simulator import all_reduce_s, closed_form_bubble, simulate
from simulator.step.step_graph import time_layer_by_layer, time_whole_passes
from simulator.step.timed import compile_schedule_of
from simulator.units import to_ns

NO_WORK = Work()
DEVICE = Device("d", 1e9, 1e9, 1e9)
LINK = Link("wire", (Protocol(1e-5, 1e8),))


def cluster_of(num_devices, *, per_node=64, contention=None, link=LINK, slow=LINK):
    return Cluster("c", DEVICE, num_devices, per_node, link, slow, contention or Contention())


def workload_of(times_ms, *, sizes=(1000, 500), output_bytes=100, optimizer=NO_WORK):
    """Layers with a forward of so many ms, and I and W of the same."""
    layers = tuple(
        Layer(f"layer {i}", sizes, Work(ms * 1e6), Work(ms * 1e6), Work(ms * 1e6), 10, output_bytes)
        for i, ms in enumerate(times_ms)
    )
    return Workload("w", layers, 4, optimizer)


def random_case(seed):
    generator = np.random.default_rng(seed)
    layers = tuple(
        Layer(
            f"layer {i}",
            tuple(generator.integers(1, 3000, generator.integers(0, 4)).tolist()),
            *(Work(float(generator.integers(0, 10**6)), float(generator.integers(0, 10**5)), 1) for _ in range(3)),
            int(generator.integers(0, 1000)),
            int(generator.integers(0, 5000)),
        )
        for i in range(generator.integers(1, 8))
    )
    workload = Workload("random", layers, 4, Work(0, 1e5, 4))
    per_node = int(generator.choice([1, 2, 4, 8]))
    contention = Contention() if generator.integers(2) else Contention(*(1 + generator.random(2)))
    links = [Link("l", (Protocol(1e-6, 10.0 ** generator.integers(7, 11)),)) for _ in range(2)]
    cluster = Cluster("c", DEVICE, per_node * 4, per_node, *links, contention)
    schedule, pipeline = str(generator.choice([*SCHEDULES])), int(generator.integers(1, 6))
    plan = Plan(
        data=int(generator.integers(1, 6)),
        pipeline=pipeline,
        num_microbatches=int(generator.integers(1, 7)),
        schedule=schedule,
        stages_per_rank={"v": 2, "loop": int(generator.integers(1, 4))}.get(SCHEDULES[schedule].placement, 1),
        gradient_sync=str(generator.choice(GRADIENT_SYNCS)),
        bucket_bytes=int(generator.integers(1, 20000)),
        first_bucket_bytes=int(generator.integers(1, 5000)),
    )
    return workload, cluster, plan


def test_one_rank_is_the_sum_of_its_work():
    step = simulate(workload_of([1, 2, 3], optimizer=Work(0, 5e6)), cluster_of(1), Plan())
    assert step.duration_s == pytest.approx(0.006 + 0.012 + 0.005)
    assert step.bubble_fraction == step.exposed_communication_s == 0
    assert step.sent_bytes_per_rank == (0,)
    assert [(span.name, span.kind) for span in step.trace] == [
        ("forward", "F"),
        ("backward", "B"),
        ("optimizer", "optimizer"),
    ]


def test_overlapped_buckets_start_when_ready_and_one_after_the_other():
    workload = workload_of([4, 1, 1, 1], sizes=(50_000, 10))
    plan = Plan(data=4, bucket_bytes=1, first_bucket_bytes=1)
    cluster = cluster_of(4)
    step = simulate(workload, cluster, plan)
    spans = [span for span in step.trace if span.kind == "all_reduce" and span.rank == 0]
    sizes = [size * 4 for layer in workload.layers for size in layer.parameter_sizes]
    buckets = assign_buckets(sizes, 1, 1)
    assert [span.num_bytes for span in spans] == [bucket.num_bytes for bucket in buckets]
    free, ready = 0, to_ns(0.007)
    copies = iter(step.stages[0].buckets)
    for layer in reversed(range(4)):
        ready += step.stages[0].backward_ns[layer]
        for _ in range(2):
            sync, span = next(copies), spans.pop(0)
            ready += sync.pack_ns
            assert span.start_ns == max(ready, free)
            free = span.start_ns + to_ns(all_reduce_s(sync.num_bytes, 4, LINK))
            assert span.end_ns == free
    optimizer = next(span for span in step.trace if span.kind == "optimizer")
    assert optimizer.start_ns == max(free, ready)


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), [("gpipe", 3, 2), ("one_f_one_b", 4, 16)])
def test_free_communication_gives_the_textbook_bubble(schedule, stages, microbatches):
    link = Link("free", (Protocol(0.0, 1e30),))
    plan = Plan(pipeline=stages, num_microbatches=microbatches, schedule=schedule)
    step = simulate(workload_of([1] * stages), cluster_of(stages, link=link), plan)
    assert step.bubble_fraction == pytest.approx(closed_form_bubble(stages, microbatches), abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_any_configuration_runs_or_says_clearly_why_not(seed):
    workload, cluster, plan = random_case(seed)
    if plan.world_size > cluster.num_devices or plan.pipeline * plan.stages_per_rank > len(workload.layers):
        with pytest.raises(ValueError, match=r"^the plan (needs|has) "):
            simulate(workload, cluster, plan)
        return
    step = simulate(workload, cluster, plan)
    trace = step.trace
    for rank in trace.ranks:
        for lane in ("compute", "communication", "send forward", "send backward"):
            spans = trace.select((trace.rank == rank) & trace.is_word("lane", lane))
            order = np.lexsort((spans.end_ns, spans.start_ns))
            assert (spans.start_ns[order][1:] >= spans.end_ns[order][:-1]).all()
    computing, wires = np.zeros(plan.pipeline, np.int64), np.zeros(plan.pipeline, np.int64)
    for stage in step.stages:
        passes = sum(stage.forward_ns) + sum(stage.backward_ns)
        computing[stage.rank] += passes * plan.num_microbatches + stage.optimizer_ns
        wires[stage.rank] += sum(sync.duration_ns for sync in stage.buckets)
    total = round(step.duration_s * 1e9)
    assert total >= max(computing.max(), wires.max())
    assert 0 <= step.bubble_fraction < 1
    assert 0 <= step.exposed_communication_s <= step.duration_s
    if plan.data > 1:
        sent = sum(span.num_bytes for span in trace if span.kind == "all_reduce")
        assert sent == plan.data * workload.gradient_bytes
    starts = {(s.stage, s.microbatch): s.start_ns for s in trace if s.kind == "F" and s.rank % plan.data == 0}
    for span in trace:
        if span.kind == "recv" and span.rank % plan.data == 0 and "F" in span.name:
            assert starts[span.stage, span.microbatch] >= span.end_ns
    assert len(step.layer_trace) > 0 or total == 0
    assert str(step)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_whole_passes_equal_passes_run_layer_by_layer(seed):
    """Where nothing is slowed down, the two ways to lay a step give the same times."""
    workload, cluster, plan = random_case(seed)
    cluster = replace(cluster, contention=Contention(), num_devices=cluster.devices_per_node * 32)
    if plan.pipeline * plan.stages_per_rank > len(workload.layers):
        return
    plan = replace(plan, sharding=Sharding(seed % 2))
    step = simulate(workload, cluster, plan)
    how = (compile_schedule_of(plan, None, step.stages), step.stages, plan, cluster)
    whole, in_layers = time_whole_passes(*how), time_layer_by_layer(*how)
    for name in ("start_ns", "end_ns", "send_start_ns", "send_end_ns"):
        assert np.array_equal(getattr(whole, name), getattr(in_layers, name)), name
    assert whole.layers is None
    assert (np.diff(in_layers.rows[:, 0]) >= 0).all()
    assert whole.buckets == in_layers.buckets
    assert whole.optimizer == in_layers.optimizer
    assert whole.calls == in_layers.calls


def test_a_slow_link_queues_messages_in_order():
    link = Link("slow", (Protocol(0.0, 1e4),))  # 100 bytes: 10 ms, longer than a pass
    plan = Plan(pipeline=2, num_microbatches=4, schedule="gpipe")
    step = simulate(workload_of([1, 1]), cluster_of(2, link=link), plan)
    sends = [s for s in step.trace if s.kind == "send" and s.rank == 0]
    assert [s.end_ns - s.start_ns for s in sends] == [10_000_000] * 4
    assert sends[-1].end_ns == 41_000_000


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(data=3, pipeline=2), r"needs 3 \(data\) x 2 \(pipeline\) = 6 ranks; cluster 'c' has 4 devices"),
        (Plan(pipeline=4), "has 4 pipeline stages; workload 'w' has 2 layers; use at most 2 stages"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        simulate(workload_of([1, 1]), cluster_of(4), plan)
