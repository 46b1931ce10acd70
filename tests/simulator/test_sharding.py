"""Steps whose states are sharded: when units are gathered and scattered, what ranks send; what holds for every one."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st
from sharding_cases import FAST, cluster_of, plan_of, spans_of, workload_of

from distlab.plan import Contention, Link, Plan, Protocol, Sharding, Software
from simulator import all_gather_s, all_reduce_s, cluster, gpt_workload, memory_of, simulate, sweep_units
from simulator.gradients.fsdp_units import units_of
from simulator.sweeps.fsdp_units import with_unit_layers
from simulator.units import to_ns


def test_units_are_blocks_and_what_is_left_is_the_root():
    units = units_of(workload_of([1, 1, 1], ends=7).layers, 2)
    assert [unit.name for unit in units] == ["unit 0", "unit 1", "unit 2"]
    assert [(unit.layers, unit.is_root) for unit in units] == [((0, 4), True), ((1, 2), False), ((3,), False)]
    assert [unit.num_elements for unit in units] == [14, 160_000, 80_000]
    assert not units_of(workload_of([1, 1]).layers, 1)[0].is_root


def test_stage_three_by_hand():
    """Three blocks of 1 ms forward; a gather or scatter takes 2.4 ms: 3/4 of 320,000 bytes at 1e8 bytes/s."""
    step = simulate(workload_of([1, 1, 1]), cluster_of(4), plan_of(3))
    call, forward, backward = 2_400_000, 1_000_000, 2_000_000
    pack, unpack = 6_400, 1_600  # 2 x 320,000 bytes, and a quarter of that, at 1e11 bytes/s
    turn = 3 * call + forward  # each block waits for its gather; here the last one ends
    second = turn + 2 * call  # block 1 waits for two gathers to run backward
    first_scatter = second + backward + unpack + pack  # for it block 1 waits until unit 2 has been scattered
    assert [(span.name, span.start_ns) for span in spans_of(step, "gather")] == [
        ("all_gather unit 0", 0),
        ("all_gather unit 1", call),
        ("all_gather unit 2", 2 * call),
        ("all_gather unit 2", turn),
        ("all_gather unit 1", turn + call),
        ("all_gather unit 0", second + call),  # behind the scatter of unit 2
    ]
    scatters = [(span.name, span.start_ns) for span in spans_of(step, "scatter")]
    assert scatters[0] == ("reduce_scatter unit 2", second), scatters
    compute = {span.name: (span.start_ns, span.end_ns) for span in spans_of(step, "compute")}
    assert compute["backward block 2"][0] == turn + call
    assert compute["pack unit 2"] == (turn + call + backward, turn + call + backward + pack)
    assert compute["backward block 1"][0] == second
    arrived = second + call  # of unit 2's gradients; block 1's backward is over before
    assert compute["unpack unit 2"] == (arrived, arrived + unpack)
    assert compute["backward block 0"][0] == max(arrived + call, compute["pack unit 1"][1])
    assert [name for name, _ in scatters] == [f"reduce_scatter unit {unit}" for unit in (2, 1, 0)]
    assert first_scatter <= scatters[1][1]
    assert compute["optimizer"][0] == compute["unpack unit 0"][1] == spans_of(step, "scatter")[-1].end_ns + unpack
    assert compute["optimizer"][1] - compute["optimizer"][0] == to_ns(8e7 / 4 / 1e11)


def test_prefetch_asks_for_the_next_unit_before_this_one_computes():
    workload = workload_of([10, 10, 10, 10])
    for prefetch in (0, 1, 2):
        step = simulate(workload, cluster_of(4), plan_of(3, prefetch=prefetch))
        compute = {span.name: span for span in spans_of(step, "compute")}
        gathers = [span for span in spans_of(step, "gather") if span.start_ns < compute["forward block 3"].end_ns]
        for number, gather in enumerate(gathers[:4]):
            before = compute.get(f"forward block {number - prefetch - 1}")  # then the program goes on, and asks
            asked = before.end_ns if before else 0
            wire_is_free = gathers[number - 1].end_ns if number else 0
            assert gather.start_ns == max(asked, wire_is_free), (prefetch, number)


def test_without_no_sync_each_micro_batch_scatters():
    """FSDP outside of no_sync: a third of three micro-batches' bytes travel once, and all wire hides no more."""
    workload, once = workload_of([1, 1, 1], ends=1000), cluster_of(4)
    each = replace(once, software=Software(scatters_each=True))
    plan = plan_of(3, microbatches=3, recompute="full")
    late, early = (simulate(workload, machine, plan) for machine in (once, each))
    assert len(spans_of(late, "scatter")) == 4
    assert [span.microbatch for span in spans_of(early, "scatter")] == [m for m in range(3) for _ in range(4)]
    sizes = [unit.scatter[0].sent_bytes for unit in early.stages[0].units]
    assert early.sent_bytes_by_axis["data"] - late.sent_bytes_by_axis["data"] == pytest.approx(2 * sum(sizes))
    assert early.steady_s > late.steady_s
    one = plan_of(3, recompute="full")
    assert simulate(workload, once, one).steady_s == simulate(workload, each, one).steady_s


@pytest.mark.parametrize("stage", [1, 2])
def test_optimizer_states_that_are_sharded_scatter_in_backward_and_gather_at_the_end(stage):
    workload = workload_of([1, 2, 1])
    plain = simulate(workload, cluster_of(4), plan_of(0))
    step = simulate(workload, cluster_of(4), plan_of(stage))
    *scatters, faults = spans_of(step, "scatter")
    assert [span.name for span in scatters] == [f"reduce_scatter bucket {i}" for i in range(3)]
    assert (faults.name, faults.num_bytes) == ("all_reduce faults", 18)
    assert faults.end_ns == spans_of(step, "compute")[-1].start_ns
    assert [span.name for span in spans_of(step, "gather")] == [f"all_gather bucket {i}" for i in range(3)]
    update = spans_of(step, "compute")[-1]
    assert update.end_ns - update.start_ns == to_ns(8e7 / 4 / 1e11)
    gathers = spans_of(step, "gather")
    assert (gathers[0].start_ns, to_ns(step.duration_s)) == (update.end_ns, gathers[-1].end_ns)
    told = 2 * 3 / 4 * 6 * 3  # 6 bytes for each of three parameters
    assert step.sent_bytes_per_rank == pytest.approx([plain.sent_bytes_per_rank[0] + told] * 4)  # two halves are one


def test_stage_two_sums_each_micro_batch_and_stage_one_the_last():
    """A micro-batch of stage 2 begins when the sums of the one before are there."""
    workload = workload_of([1, 2, 1])
    for contention in (None, Contention(1.1, 1.5)):
        cluster = cluster_of(4, contention=contention)
        once, one, two = (simulate(workload, cluster, plan_of(s, microbatches=m)) for s, m in ((2, 1), (1, 3), (2, 3)))
        assert len(spans_of(one, "scatter")) == 4
        assert [span.microbatch for span in spans_of(two, "scatter")] == [0] * 3 + [1] * 3 + [-1] * 4
        update, faults = spans_of(once, "compute")[-1], spans_of(once, "scatter")[-1]
        assert spans_of(two, "compute")[-1].start_ns == 3 * faults.start_ns + faults.end_ns - faults.start_ns
        once_s = once.duration_s - update.end_ns / 1e9 + faults.duration_s
        assert two.exposed_communication_s == pytest.approx(3 * once.exposed_communication_s - 2 * once_s)
        told = 2 * 3 / 4 * 6 * 3
        assert two.sent_bytes_per_rank[0] - told == pytest.approx(2 * (once.sent_bytes_per_rank[0] - told))
        for earlier, later in pairwise(spans_of(two, "compute")):
            assert earlier.end_ns <= later.start_ns


def test_sent_bytes_are_two_and_three_times_the_parameters():
    sizes = [80_000, 40_001, 3]
    workload = workload_of([1, 1, 1], sizes)
    for data in (2, 3):
        padded = sum(-(-size // data) * data * 4 for size in sizes)
        for stage in (1, 2):
            step = simulate(workload, cluster_of(data), plan_of(stage, data=data))
            whole = sum(sync.num_bytes for sync in step.stages[0].buckets)  # two buckets, each padded
            assert workload.gradient_bytes <= whole < workload.gradient_bytes + 2 * 4 * data
            told = 6 * len(sizes)  # what became of each parameter's gradient, all-reduced
            assert step.sent_bytes_per_rank == pytest.approx([2 * (whole + told) * (data - 1) / data] * data)
        for stays, times in ((False, 3), (True, 2)):
            plan = plan_of(3, data=data, reshard_after_forward=not stays)
            sent = simulate(workload, cluster_of(data), plan).sent_bytes_per_rank
            assert sent == pytest.approx([times * padded * (data - 1) / data] * data)


def test_hybrid_sharding_keeps_gathers_inside_a_node():
    workload = workload_of([1, 1, 1])
    network = Link("network", (Protocol(0.0, 2.5e7),))  # four wires of a node are together slower than one inside
    cluster = cluster_of(8, per_node=4, intra=FAST, inter=network)
    whole = simulate(workload, cluster, plan_of(3, data=8))
    hybrid = simulate(workload, cluster, plan_of(3, data=8, replicas=2))
    gather, scatter = spans_of(hybrid, "gather")[0], spans_of(hybrid, "scatter")[:2]
    size = 320_000
    assert gather.end_ns - gather.start_ns == to_ns(all_gather_s(size, 4, FAST))
    assert [span.kind for span in scatter] == ["reduce_scatter", "all_reduce"]
    assert scatter[1].end_ns - scatter[1].start_ns == to_ns(all_reduce_s(size // 4, 2, network))
    moves = [[*spans_of(step, "gather"), *spans_of(step, "scatter")] for step in (hybrid, whole)]
    wire_s = [sum(span.duration_s for span in spans) for spans in moves]
    assert wire_s[0] < wire_s[1]
    for stage, times in ((1, 2), (3, 3)):
        step = simulate(workload, cluster, plan_of(stage, data=8, replicas=2))
        want = times * 3 * size * 3 / 4 + 3 * size / 4  # 2 (r-1)/r = 1 of a shard
        want += 2 * 7 / 8 * 6 * 3 if stage == 1 else 0  # all eight ranks tell each other of faults
        assert step.sent_bytes_per_rank[0] == pytest.approx(want)
        assert {"reduce_scatter", "all_reduce"} == {span.kind for span in spans_of(step, "scatter")}


@pytest.mark.parametrize(("stage", "offload"), [(1, "optimizer"), (3, "optimizer"), (3, "all")])
def test_offload_copies_shards_over_the_hosts_link(stage, offload):
    step = simulate(workload_of([1, 1]), cluster_of(4), plan_of(stage, offload=offload))
    host = spans_of(step, "host")
    update = next(span for span in host if span.kind == "optimizer")
    assert update.end_ns - update.start_ns == to_ns(8e7 / 1e9), "four ranks share one host"
    alone = replace(cluster_of(4), software=Software(host_thread_bytes_per_s=1e8))
    slow = spans_of(simulate(workload_of([1, 1]), alone, plan_of(stage, offload=offload)), "host")
    assert {s.end_ns - s.start_ns for s in slow if s.kind == "optimizer"} == {to_ns(2e7 / 1e8)}, "a thread each"
    down = [span for span in host if span.name.startswith("to host")]
    up = [span for span in host if span.name.startswith("to device")]
    assert {span.num_bytes for span in down + up} == {80_000}
    assert {span.end_ns - span.start_ns for span in down + up} == {to_ns(80_000 / 1e8)}
    assert max(span.end_ns for span in down) == update.start_ns
    if offload == "all":  # each gather needs its shard on the device first
        assert len(up) == len(spans_of(step, "gather"))
        for copy, gather in zip(up, spans_of(step, "gather"), strict=True):
            assert copy.end_ns <= gather.start_ns
    else:
        assert (len(up), min(span.start_ns for span in up)) == (2, update.end_ns)
    assert to_ns(step.duration_s) == max(span.end_ns for span in step.layer_trace)


shardings = st.builds(
    Sharding, stage=st.integers(1, 3), unit_layers=st.integers(1, 4), reshard_after_forward=st.booleans(),
    prefetch=st.integers(0, 3), replicas=st.sampled_from([1, 2]), offload=st.sampled_from(["none", "optimizer"]),
)  # fmt: skip
contentions = st.sampled_from([Contention(), Contention(1.2, 1.7)])


@settings(max_examples=30, deadline=None)
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


WORKLOAD = workload_of([3.0] * 12, [40_000] * 12, ends=1000)


def test_each_size_is_a_step_of_its_own():
    cluster, plan = cluster_of(4), plan_of(3)
    sweep = sweep_units(WORKLOAD, cluster, plan)
    assert (sweep.unit_layers, sweep.num_units) == ((1, 2, 3, 4, 6, 12), (12, 6, 4, 3, 2, 1))
    for index, layers in enumerate(sweep.unit_layers):
        step = simulate(WORKLOAD, cluster, with_unit_layers(plan, layers))
        assert sweep.duration_s[index] == step.duration_s
        assert sweep.exposed_s[index] == step.exposed_communication_s
        assert sweep.memory_bytes[index] == memory_of(WORKLOAD, step.plan).max_bytes
        ahead = min(12, 2 * layers)  # the unit at work and the next
        assert sweep.gathered_bytes[index] == 160_000 * ahead + 2000 * 4


M = 4


def step_of(stage, schedule, stages_per_rank, num_layers=8, **sharding):
    plan = plan_of(stage, data=2, microbatches=M, **sharding)
    plan = replace(plan, pipeline=2, schedule=schedule, stages_per_rank=stages_per_rank)
    return simulate(workload_of([1] * num_layers, ends=1000), cluster_of(4), plan)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("one_f_one_b", 1), ("interleaved", 2)])
def test_stage_3_gathers_in_every_pass_and_scatters_in_a_stages_last_backward(schedule, stages_per_rank):
    step = step_of(3, schedule, stages_per_rank)
    for rank in range(2):
        own = [stage for stage in step.stages if stage.rank == rank]
        num_units = sum(len(stage.units) for stage in own)
        gathers, scatters = spans_of(step, "gather", 2 * rank), spans_of(step, "scatter", 2 * rank)
        assert len(gathers) == 2 * M * num_units
        assert set(Counter(span.microbatch for span in gathers).values()) == {2 * num_units}
        assert len(scatters) == num_units
        computing = [span for span in step.trace if span.rank == 2 * rank and span.kind in ("F", "B")]
        passes = sorted(computing, key=lambda span: span.start_ns)
        assert len(passes) == 2 * M * len(own)
        assert gathers[0].end_ns <= passes[0].start_ns, "a stage computes with what it has gathered"
        assert max(span.end_ns for span in scatters) <= spans_of(step, "compute", 2 * rank)[-1].start_ns
    arrived = spans_of(step, "recv forward", 2)[0].end_ns
    assert spans_of(step, "gather", 2)[0].start_ns >= arrived, "a stage asks for parameters when its input has come"
    kept = step_of(3, schedule, stages_per_rank, reshard_after_forward=False)
    assert len(spans_of(kept, "gather", 0)) < len(spans_of(step, "gather", 0))


WIDE_GPT = gpt_workload(hidden_size=1024, num_layers=4, num_heads=8, sequence_length=256, vocab_size=1024)


def test_nothing_is_gathered_ahead_beyond_the_limit():
    machine = cluster("dgx-a100", 32)
    size = simulate(WIDE_GPT, machine, Plan(data=32, sharding=Sharding(3))).stages[0].units[1].unit.num_elements
    for live, prefetch in ((1.5 * size, 0), (3 * size, 2), (None, 3)):
        small = replace(machine, software=replace(machine.software, live_elements=live))
        limited = simulate(WIDE_GPT, small, Plan(data=32, sharding=Sharding(3, prefetch=3)))
        free = simulate(WIDE_GPT, machine, Plan(data=32, sharding=Sharding(3, prefetch=prefetch)))
        assert limited.duration_s == free.duration_s
