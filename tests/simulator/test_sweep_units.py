"""Sweeping the size of a unit: what it holds, what it exposes, and which sizes are worth choosing from."""

import pytest
from sharding_cases import cluster_of, plan_of, workload_of

from simulator import memory_of, simulate, sweep_units
from simulator.sweeps.fsdp_units import unit_sizes, with_unit_layers

WORKLOAD = workload_of([3.0] * 12, [40_000] * 12, ends=1000)


def test_each_size_is_a_step_of_its_own():
    cluster, plan = cluster_of(4), plan_of(3)
    sweep = sweep_units(WORKLOAD, cluster, plan)
    assert sweep.unit_layers == (1, 2, 3, 4, 6, 12)
    assert sweep.num_units == (12, 6, 4, 3, 2, 1)
    assert sweep.unit_bytes == tuple(160_000 * layers for layers in sweep.unit_layers)
    for index, layers in enumerate(sweep.unit_layers):
        step = simulate(WORKLOAD, cluster, with_unit_layers(plan, layers))
        assert sweep.duration_s[index] == step.duration_s
        assert sweep.exposed_s[index] == step.exposed_communication_s
        assert sweep.memory_bytes[index] == memory_of(WORKLOAD, step.plan).max_bytes
        ahead = min(12, 2 * layers)  # the unit at work and the next
        assert sweep.gathered_bytes[index] == 160_000 * ahead + 2000 * 4


def test_larger_units_hold_more():
    sweep = sweep_units(WORKLOAD, cluster_of(4), plan_of(3))
    assert list(sweep.memory_bytes) == sorted(sweep.memory_bytes)
    assert sweep.smallest == 0
    assert sweep.duration_s[sweep.fastest] == min(sweep.duration_s)


def test_a_unit_of_everything_cannot_hide_its_gather():
    sweep = sweep_units(WORKLOAD, cluster_of(4), plan_of(3))
    assert sweep.exposed_s[-1] == max(sweep.exposed_s)
    assert sweep.exposed_s[-1] > 2 * min(sweep.exposed_s)


def test_sizes_make_different_numbers_of_units():
    assert unit_sizes(workload_of([1.0] * 7)) == (1, 2, 3, 4, 7)
    many = unit_sizes(workload_of([1.0] * 400))
    assert len(many) == 24
    assert (many[0], many[-1]) == (1, 400)


def test_gathering_ahead_saves_time():
    ahead, behind = (simulate(WORKLOAD, cluster_of(4), plan_of(3, prefetch=units)) for units in (1, 0))
    assert ahead.duration_s < 0.95 * behind.duration_s


def test_a_plan_without_units_is_refused():
    with pytest.raises(ValueError, match="sharding stage is 1; pass a plan of stage 3"):
        sweep_units(WORKLOAD, cluster_of(4), plan_of(1))
    with pytest.raises(ValueError, match="sizes is empty; pass at least one number of layers"):
        sweep_units(WORKLOAD, cluster_of(4), plan_of(3), sizes=[])
