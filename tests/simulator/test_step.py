"""A step of any plan: by hand, within its bounds, and the same by whole passes as layer by layer."""

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
from tests.simulator import sharding_cases as blocks
from tests.simulator.step_cases import EACH, LINK, cluster_of, workload_of


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
    device = Device("d", 1e9, 1e9, 1e9)
    links = [Link("l", (Protocol(1e-6, 10.0 ** generator.integers(7, 11)),)) for _ in range(2)]
    cluster = Cluster("c", device, per_node * 4, per_node, *links, contention)
    schedule, pipeline = str(generator.choice([*SCHEDULES])), int(generator.integers(1, 6))
    data = int(generator.integers(1, 6))
    codec = EACH[generator.integers(len(EACH))] if data > 1 and schedule == "one_f_one_b" else None
    plan = Plan(
        data=data,
        compression=codec,
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
    step = simulate(blocks.workload_of([1, 2, 3]), blocks.cluster_of(1), Plan())
    assert step.duration_s == pytest.approx(0.006 + 0.012 + 0.0008)
    assert step.bubble_fraction == step.exposed_communication_s == 0
    assert step.sent_bytes_per_rank == (0,)
    assert [(span.name, span.kind) for span in step.trace] == [
        ("forward", "F"),
        ("backward", "B"),
        ("optimizer", "optimizer"),
    ]


def test_overlapped_buckets_start_when_ready_and_one_after_the_other():
    workload = workload_of(*[((50_000,), (10,))] * 4)
    plan = Plan(data=4, bucket_bytes=1, first_bucket_bytes=1)
    step = simulate(workload, cluster_of(4), plan)
    spans = [span for span in step.trace if span.kind == "all_reduce" and span.rank == 0]
    sizes = [size * 4 for layer in workload.layers for size in layer.parameter_sizes]
    buckets = assign_buckets(sizes, 1, 1)
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
    optimizer = next(span for span in step.trace if span.kind == "optimizer")
    assert optimizer.start_ns == max(free, ready)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_whole_passes_equal_passes_run_layer_by_layer(seed):
    """Where nothing is slowed down, the two ways to lay a step give the same times."""
    workload, cluster, plan = random_case(seed)
    cluster = replace(cluster, contention=Contention(), num_devices=cluster.devices_per_node * 32)
    if plan.pipeline * plan.stages_per_rank > len(workload.layers):
        return
    plan = replace(plan, sharding=Sharding(seed % 2 if plan.compression is None else 0))
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
    step = simulate(blocks.workload_of([1, 1]), blocks.cluster_of(2, intra=link), plan)
    sends = [s for s in step.trace if s.kind == "send" and s.rank == 0]
    assert [s.end_ns - s.start_ns for s in sends] == [10_000_000] * 4
    assert sends[-1].end_ns == 41_000_000


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), [("gpipe", 3, 2), ("one_f_one_b", 4, 16)])
def test_free_communication_gives_the_textbook_bubble(schedule, stages, microbatches):
    machine = blocks.cluster_of(stages, intra=Link("free", (Protocol(0.0, 1e30),)))
    workload = replace(blocks.workload_of([1.0] * stages), optimizer=Work())
    step = simulate(workload, machine, Plan(1, stages, microbatches, schedule=schedule))
    assert step.bubble_fraction == pytest.approx(closed_form_bubble(stages, microbatches), abs=1e-9)
