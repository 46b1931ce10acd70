"""Stacks of software, launches, messages between stages, and the steady time of a step."""

from dataclasses import replace

import pytest

import simulator as sim
from distlab.plan import Cluster, Device, Link, Plan, Precision, Protocol, Sharding, Software
from distlab.plan.partition import CUTS

WORKLOAD = sim.gpt_workload(
    hidden_size=1024, num_layers=8, num_heads=16, sequence_length=512, vocab_size=8192, microbatch_size=2
)
WIRE = Link("wire", (Protocol(1e-6, 1e11),))
MACHINE = Cluster("machine", Device("card", 1e14, 1e12, 80e9), 8, 8, WIRE, WIRE)


def test_every_stack_slows_devices_and_wires_and_says_where_its_numbers_are_from():
    bare = sim.cluster("dgx-a100", 16, stack="best-case")
    for name in sim.names("stacks"):
        own = sim.cluster("dgx-a100", 16, stack=name)
        assert own.device.matmul_flops_per_s <= bare.device.matmul_flops_per_s, name
        assert own.device.memory_bytes_per_s <= bare.device.memory_bytes_per_s, name
        assert own.inter_node.protocols[0].bytes_per_s <= bare.inter_node.protocols[0].bytes_per_s, name
        assert "20" in sim.stack(name).source, name
        assert len(sim.stack(name).software) > 10, name
    warps, groups = sim.Stack("warps", warp_attention=True), sim.Stack("groups")
    for name, part in (("dgx-h100", 0.629), ("dgx-a100", 1.0)):  # attention of single warps is slower on Hopper alone
        slow, fast = (sim.cluster(name, stack=each).device.attention_flops_per_s for each in (warps, groups))
        assert slow == pytest.approx(part * fast)


def test_a_cluster_has_its_own_stack_and_takes_another():
    assert sim.cluster("dgx-a100") == sim.cluster("dgx-a100", stack="megatron")
    assert (
        sim.cluster("dgx-a100", stack=sim.Stack("mine", matmul_fraction=0.5)).device.matmul_flops_per_s == 271.2e12 / 2
    )
    assert sim.cluster("dgx-a100", measured=False) == sim.cluster("dgx-a100", measured=False, stack="fsdp")
    assert sim.device("a100-sxm-80gb").kernel_s == 0


def test_overlap_hides_a_part_of_tensor_ranks_calls():
    plan = Plan(tensor=4)
    waits = [
        sim.simulate(WORKLOAD, replace(MACHINE, software=Software(tensor_overlap=part)), plan).exposed_by_axis["tensor"]
        for part in (0.0, 0.5, 1.0)
    ]
    assert waits[0] > waits[1] > waits[2] == 0


def test_gathers_of_stage_1_hide_under_the_next_forward():
    plan = Plan(data=4, sharding=Sharding(1))
    behind, ahead = (
        sim.simulate(WORKLOAD, replace(MACHINE, software=Software(gathers_ahead=on)), plan) for on in (False, True)
    )
    gathers = sum(bucket.gather.duration_ns for bucket in behind.stages[0].buckets) / 1e9
    assert ahead.duration_s == pytest.approx(behind.duration_s - gathers, rel=1e-3)


@pytest.mark.parametrize(
    ("plan", "bytes_each"),
    [
        (Plan(num_microbatches=4), 18),
        (Plan(data=4, num_microbatches=4, gradient_sync="flat"), 18),
        (Plan(data=4, num_microbatches=4, sharding=Sharding(1)), 6 + 12 / 4),
        (Plan(data=4, num_microbatches=4, sharding=Sharding(3)), 18 / 4),
    ],
)
def test_gradients_in_flat_buffers_are_held_once(plan, bytes_each):
    """Bytes per parameter with sums in 32 bits, as Megatron-LM's documentation prints them for one rank and for d."""
    plan = replace(plan, precision=Precision("bfloat16", gradients="float32"))
    step = sim.simulate(WORKLOAD, replace(MACHINE, software=Software(flat_buffers=True)), plan)
    own, copied = step.memory, sim.simulate(WORKLOAD, MACHINE, plan).memory
    states = sum(own.of(kind) for kind in ("parameters", "gradients", "optimizer", "master weights"))
    assert states == pytest.approx(bytes_each * WORKLOAD.num_parameters, rel=1e-4)
    assert sim.memory_of(WORKLOAD, plan, flat_buffers=True).of("gradients") == own.of("gradients")
    if plan.sharding.stage < 3:
        assert own.of("buffers") == 0
        assert own.max_bytes <= copied.max_bytes
    if plan.data > 1 and plan.num_microbatches > 1 and plan.sharding.stage < 3:
        assert copied.max_bytes - own.max_bytes == pytest.approx(4 * WORKLOAD.num_parameters, rel=0.05)


def test_stages_have_as_many_blocks_each_whatever_they_cost():
    heavy = sim.gpt_workload(hidden_size=256, num_layers=8, num_heads=4, sequence_length=128, vocab_size=50304)
    by_time, even = (sim.simulate(heavy, MACHINE, Plan(pipeline=4, num_microbatches=8, cut=cut)) for cut in CUTS)
    assert [len(stage.layers) for stage in even.stages] == [3, 2, 2, 3]
    assert len(by_time.stages[-1].layers) < 3  # the head is as much work as some blocks
    assert by_time.duration_s < even.duration_s
    kept = [stage.kept.shape[0] for stage in sim.memory_of(heavy, even.plan).stages]
    assert kept == [3, 2, 2, 3]


@pytest.mark.parametrize("tensor", [1, 2])
def test_recompute_that_stops_early_leaves_a_layers_last_product_out(tensor):
    """Of a block's 24 B s h^2 operations in forward the last product has 8: they, and its call, are not run again."""
    early = replace(MACHINE, software=Software(stops_early=True))
    whole, less, none = (
        sim.simulate(WORKLOAD, machine, Plan(tensor=tensor, recompute=recompute))
        for machine, recompute in ((MACHINE, "full"), (early, "full"), (early, "none"))
    )
    product_s = 8 * 2 * 512 * 1024**2 * 8 / tensor / 1e14
    saved = whole.duration_s - less.duration_s
    assert less.duration_s > none.duration_s
    if tensor == 1:
        assert saved == pytest.approx(product_s, rel=1e-3)
    else:
        calls = (step.sent_bytes_by_axis["tensor"] for step in (whole, less, none))
        sent, sent_early, sent_once = calls
        assert sent_early - sent_once == pytest.approx((sent - sent_once) / 2)  # one of a block's two sums
        assert saved > product_s
