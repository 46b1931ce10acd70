"""What holds for every sharded step: no lane is cut short, prefetch helps, smaller units hold less."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from sharding_cases import cluster_of, plan_of, workload_of

from distlab.plan import Cluster, Contention, Device, Link, Protocol, Sharding
from simulator import gpt_workload, simulate
from simulator.gradients.fsdp_units import peak_gathered_elements, units_of
from simulator.units import to_ns

shardings = st.builds(
    Sharding,
    stage=st.integers(1, 3),
    unit_layers=st.integers(1, 4),
    reshard_after_forward=st.booleans(),
    prefetch=st.integers(0, 3),
    replicas=st.sampled_from([1, 2]),
    offload=st.sampled_from(["none", "optimizer"]),
)
contentions = st.sampled_from([Contention(), Contention(1.2, 1.7)])


@settings(max_examples=60, deadline=None)
@given(shardings, st.lists(st.floats(0.1, 5), min_size=1, max_size=6), st.integers(1, 3), contentions)
def test_a_step_is_never_shorter_than_any_of_its_lanes(sharding, milliseconds, microbatches, contention):
    plan = replace(plan_of(3, microbatches=microbatches), sharding=sharding)
    step = simulate(workload_of(milliseconds, ends=50_000), cluster_of(4, contention=contention), plan)
    totals = {}
    for span in step.layer_trace:
        if span.rank == 0:
            lane = "wire" if span.lane in ("gather", "scatter") else span.lane
            lane = span.name.split(" unit")[0].split(" bucket")[0] if lane == "host" else lane
            totals[lane] = totals.get(lane, 0) + span.end_ns - span.start_ns
    duration = to_ns(step.duration_s)
    assert duration >= max(totals.values())
    assert 0 <= to_ns(step.exposed_communication_s) < duration
    host = totals.get("optimizer", 0)  # an update on the host is no communication either
    assert to_ns(step.exposed_communication_s) == pytest.approx(duration - totals["compute"] - host, abs=2)
    assert 0 <= step.bubble_fraction < 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=6), st.integers(1, 3), st.booleans())
def test_prefetch_ahead_is_never_slower_than_none(milliseconds, unit_layers, stays):
    options = {"unit_layers": unit_layers, "reshard_after_forward": not stays}
    workload = workload_of(milliseconds, ends=50_000)
    times = [simulate(workload, cluster_of(4), plan_of(3, prefetch=p, **options)).duration_s for p in (0, 1)]
    assert times[1] <= times[0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.integers(0, 3))
def test_smaller_units_hold_less(sizes, prefetch):
    layers = workload_of([1.0] * len(sizes), sizes, ends=10).layers
    halves = [peak_gathered_elements(units_of(layers, count), prefetch) for count in (1, 2, 4, 8)]
    assert halves == sorted(halves)
    assert halves[-1] == sum(sizes) + 20


def test_a_real_model_hides_what_a_toy_cannot():
    workload = gpt_workload(
        hidden_size=2048, num_layers=6, num_heads=16, sequence_length=2048, vocab_size=32_000, microbatch_size=4
    )
    cluster = Cluster("g", Device("g", 4e14, 2e12, 8e10, 3e-6), 8, 8, *[Link("n", (Protocol(5e-6, 2e11),))] * 2)
    none = simulate(workload, cluster, plan_of(3, data=8, prefetch=0))
    one = simulate(workload, cluster, plan_of(3, data=8, prefetch=1))
    assert one.exposed_communication_s < 0.6 * none.exposed_communication_s
