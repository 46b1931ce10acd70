"""Ranks that outnumber the cores of their machine: who waits leaves its core to the others."""

from dataclasses import replace

import numpy as np
import pytest

from distlab.plan import Contention, Plan, Sharding
from simulator import gpt_workload, simulate
from simulator.engine import event_engine as engine
from simulator.engine.event_engine import SharedCores
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, Graph
from tests.simulator.step_cases import cluster_of

GPT = gpt_workload(hidden_size=32, num_layers=6, num_heads=4, sequence_length=64, vocab_size=96)


def ends(*durations, cores, contention=None):
    """Return when computing ranks, each with one operation, are done."""
    graph = Graph()
    for rank, duration in enumerate(durations):
        graph.add(rank, COMPUTE, duration)
    return engine.run(graph, contention, cores).end_ns.tolist()


def shares(plan, num_cores):
    return simulate(GPT, replace(cluster_of(8), num_cores=num_cores), plan)


def test_a_rank_that_is_left_alone_gets_the_cores_of_those_that_are_done():
    assert ends(100, 60, cores=SharedCores(1)) == [80, 60]  # 40 are left at 60, and go twice as fast
    assert ends(100, 100, cores=SharedCores(1)) == [100, 100]  # durations are those of ranks that all compute


def test_a_rank_has_one_core_at_most():
    """Of four ranks on two cores each has half of one; two that are left have one each, and one has no more."""
    assert ends(100, 100, 200, 300, cores=SharedCores(2)) == [100, 100, 150, 200]
    assert ends(100, 200, cores=SharedCores(2, ranks_each=2)) == [100, 150]  # the same ranks, seen two by two
    assert ends(100, 200, cores=SharedCores(3, ranks_each=2)) == [100, 175]  # 2/3 of a core each, then one: 1.5 times


def test_a_message_takes_no_core_and_waits_for_none():
    graph = Graph()
    graph.add(0, COMMUNICATION, 50)
    graph.add(0, COMPUTE, 100)
    graph.add(1, COMPUTE, 40, needs=[0])
    start, end = engine.run(graph, None, SharedCores(1))
    assert end.tolist() == [50, 50, 70]  # alone at twice the speed, then the other one


def test_contention_and_shared_cores_multiply():
    graph = Graph()
    graph.add(0, COMPUTE, 100)
    graph.add(1, COMPUTE, 10)
    graph.add(0, COMMUNICATION, 1000)
    end = engine.run(graph, Contention(2.0, 1.0), SharedCores(1)).end_ns
    assert end.tolist() == [105, 10, 1000]  # 10 ns at half speed: 5 done; 95 at half of twice the speed


@pytest.mark.parametrize("seed", range(3))
def test_one_core_is_never_idle_and_does_all_the_work(seed):
    """The end follows from the sum of the work, whatever waits for what, but for ends that are rounded up."""
    generator = np.random.default_rng(seed)
    num_ranks, count = int(generator.integers(1, 7)), 40
    graph = Graph()
    for operation in range(count):
        needs = generator.choice(operation, min(2, operation), replace=False).tolist()
        graph.add(int(generator.integers(num_ranks)), COMPUTE, int(generator.integers(10**6)), needs=needs)
    # Where the last rank has nothing to do the graph has one rank fewer, and a core has more for each of the others.
    busy = 1 + max(graph.rank)
    end = engine.run(graph, None, SharedCores(1)).end_ns.max()
    assert sum(graph.duration_ns) / busy <= end <= sum(graph.duration_ns) / busy + count


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
@pytest.mark.parametrize("plan", [Plan(pipeline=2), Plan(pipeline=2, tensor=2, data=2)], ids=["pipeline", "all"])
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


def test_cores_for_all_change_nothing():
    plan = Plan(pipeline=3, data=2, num_microbatches=4)
    apart, together = (shares(plan, cores) for cores in (None, 6))
    assert together.timing.end_ns.tolist() == apart.timing.end_ns.tolist()
    assert together.duration_s == apart.duration_s


@pytest.mark.parametrize(
    "plan", [Plan(data=4), Plan(tensor=2, context=2), Plan(data=4, sharding=Sharding(stage=3)), Plan(data=2, tensor=2)]
)
def test_ranks_that_all_do_the_same_share_cores_evenly_from_start_to_end(plan):
    assert shares(plan, 1).duration_s == shares(plan, None).duration_s
