"""Layout and placement: who shares a node, which order of axes is fastest, which plans are timed; software stacks."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import simulator as sim
from distlab.blocks.models import GPT, GPTConfig
from distlab.expert_parallel import mix_experts as mix_model
from distlab.hybrid.rules import problem_of
from distlab.plan import AXES, Cluster, Device, Link, Plan, Precision, Protocol, Sharding, Software
from distlab.plan.partition import CUTS
from simulator.hardware.rank_layout import COPIES, Group, RankLayout, group_of
from simulator.units import to_ns
from tests.simulator.step_cases import LINK, cluster_of

SLOW = Link("slow", (Protocol(2e-5, 1e7),))
TWO_NODES = cluster_of(8, per_node=4, slow=SLOW)
SMALL = sim.gpt_workload(hidden_size=32, num_layers=2, num_heads=4, sequence_length=64, vocab_size=96)


def test_ranks_some_way_apart_use_both_wires():
    group = group_of(TWO_NODES, (0, 2, 4, 6))
    assert group == Group(TWO_NODES, 4, is_in_one_node=False, ranks_per_node=2)
    both = {"intra_node": LINK, "inter_node": SLOW}
    assert group.exchange_ns("all_reduce", 1e6) == to_ns(sim.hierarchical_all_reduce_s(1e6, 2, 2, **both))
    assert group.exchange_ns("all_to_all", 1e6) == to_ns(sim.hierarchical_all_to_all_s(1e6, 2, 2, **both))
    apart = group_of(TWO_NODES, (1, 5))
    assert apart.exchange_ns("all_to_all", 1e6) == to_ns(sim.all_to_all_s(1e6, 2, SLOW))
    assert apart.hop_ns(1e6) == group.hop_ns(1e6) == to_ns(2e-5 + 0.1)
    assert group_of(TWO_NODES, (4, 5, 6)) == Group(TWO_NODES, 3, is_in_one_node=True, ranks_per_node=3)
    uneven = group_of(TWO_NODES, (0, 2, 4))
    assert (uneven.is_in_one_node, uneven.ranks_per_node) == (False, 0)


def test_groups_of_a_layout_follow_its_order():
    plan = Plan(data=2, tensor=2, pipeline=2)
    layout = RankLayout(TWO_NODES, plan)
    assert layout.ranks.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.crosses_nodes(0, 1)
    assert sim.axes_inside_nodes(TWO_NODES, plan) == ("data", "tensor")
    other = ("data", "expert", "context", "tensor", "pipeline")
    assert RankLayout(TWO_NODES, plan, other).ranks.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert not RankLayout(TWO_NODES, plan, other).crosses_nodes(0, 1)
    assert sim.axes_inside_nodes(TWO_NODES, plan, other) == ("tensor", "pipeline")
    assert [group.ranks_per_node for group in RankLayout(TWO_NODES, plan, other).groups(COPIES)] == [1]


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
def test_waits_in_a_trace_of_layers_are_those_that_the_axes_expose(kind):
    step = sim.simulate(SMALL, TWO_NODES, Plan(tensor=2, context=2, pipeline=2, num_microbatches=3, context_kind=kind))
    spans = [span for span in step.layer_trace if span.rank == 0 and span.lane == "compute"]
    waits = [span for span in spans if span.kind == "wait"]
    exposed = sum(step.exposed_by_axis[axis] for axis in ("tensor", "context"))
    assert exposed > 0
    assert sum(span.end_ns - span.start_ns for span in waits) == pytest.approx(exposed * 1e9, abs=len(waits))
    whole = [span for span in step.trace if span.rank == 0 and span.lane == "compute"]
    first = [sum(span.end_ns - span.start_ns for span in row if span.microbatch == 0) for row in (spans, whole)]
    assert first[0] == first[1]  # passes are cut, not shortened


def test_calls_in_passes_of_many_seconds_are_cut_exactly():
    """A pass of 60 s, and a call that ends after as long: their product in nanoseconds has more than 63 bits."""
    huge = sim.gpt_workload(hidden_size=16384, num_layers=4, num_heads=4, sequence_length=4096, vocab_size=101)
    step = sim.simulate(huge, sim.cluster("laptop", 8), Plan(tensor=2, pipeline=2, num_microbatches=2))
    calls = [call for stage in step.stages for kind in stage.calls[:2] for layer in kind for call in layer]
    assert max(call.end_ns for call in calls) ** 2 > 2**63
    spans = step.trace.select(step.trace.is_word("lane", "tensor") & (step.trace.rank % 2 == 0))
    lengths = sorted((spans.end_ns - spans.start_ns).tolist())
    assert lengths == sorted(2 * [call.end_ns - call.start_ns for call in calls])


def test_tensor_parallelism_belongs_inside_nodes():
    plan = Plan(data=2, tensor=4, num_microbatches=4)
    found = sim.rank_orders(SMALL, TWO_NODES, plan)
    assert [placed.order[-1] for placed in found] == ["tensor", "data"]
    assert found[0].step.duration_s < found[1].step.duration_s
    assert sorted(found[0].order) == sorted(AXES)
    one_wire = sim.rank_orders(SMALL, cluster_of(8), plan)
    assert one_wire[0].step.duration_s == one_wire[1].step.duration_s


SIZES = {"num_layers": 4, "num_heads": 4, "hidden_size": 16, "vocab_size": 96}
MIXED = sim.mix_experts(sim.gpt_workload(sequence_length=32, **SIZES), 4)


def refusal(plan):
    """Return why a step of the plan is not timed; "" where it is."""
    try:
        sim.simulate(MIXED, cluster_of(64), plan)
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def model():
    made = GPT(GPTConfig(context=32, tied=False, **SIZES), torch.Generator().manual_seed(0))
    mix_model(made, 4, torch.Generator().manual_seed(1))
    return made


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sharding_goes_with_the_same_axes_as_in_hybrid(model, stage):
    for pipeline, expert, tensor, context, microbatches in product((1, 2), repeat=5):
        inner = {"expert": expert, "tensor": tensor, "context": context}
        plan = Plan(2, pipeline, microbatches, **inner, sharding=Sharding(stage))
        theirs, ours = problem_of(plan, model, AXES, plan.world_size), refusal(plan)
        alone = stage == 3 and expert > 1  # flat units, which Hybrid shards, have no experts: it is simulated alone
        assert bool(theirs) == (bool(ours) or alone), (plan, theirs, ours)
        assert ours == sim.why_not_timed(plan)
        for text in filter(None, (theirs, ours)):
            assert f"stage {stage}" in text
            assert "use stage 1" in text  # what to do instead


WIDE = {"hidden_size": 1024, "num_layers": 8, "num_heads": 16, "vocab_size": 8192}
WORKLOAD = sim.gpt_workload(**WIDE, sequence_length=512, microbatch_size=2)
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
    warps = sim.Stack("warps", warp_attention=True, on={"h100-": {"sustained_fraction": 0.5}})
    for name, part, ours in (("dgx-h100", 0.629, 0.5 / 0.835), ("dgx-a100", 1.0, 1.0)):  # slower on Hopper alone
        slow, fast = (sim.cluster(name, stack=each).device for each in (warps, sim.Stack("groups")))
        assert slow.attention_flops_per_s == pytest.approx(part * fast.attention_flops_per_s)
        assert slow.matmul_flops_per_s == pytest.approx(ours * fast.matmul_flops_per_s)


def test_a_cluster_has_its_own_stack_and_takes_another():
    assert sim.cluster("dgx-a100") == sim.cluster("dgx-a100", stack="megatron")
    half = sim.cluster("dgx-a100", stack=sim.Stack("mine", matmul_fraction=0.5))
    assert half.device.matmul_flops_per_s == 271.2e12 / 2
    assert sim.cluster("dgx-a100", measured=False) == sim.cluster("dgx-a100", measured=False, stack="fsdp")
    assert sim.device("a100-sxm-80gb").kernel_s == 0


def test_overlap_hides_a_part_of_tensor_ranks_calls():
    plan = Plan(tensor=4)
    machines = [replace(MACHINE, software=Software(tensor_overlap=part)) for part in (0.0, 0.5, 1.0)]
    waits = [sim.simulate(WORKLOAD, machine, plan).exposed_by_axis["tensor"] for machine in machines]
    assert waits[0] > waits[1] > waits[2] == 0


def test_gathers_of_stage_1_hide_under_the_next_forward():
    plan = Plan(data=4, sharding=Sharding(1))
    machines = [replace(MACHINE, software=Software(gathers_ahead=ahead)) for ahead in (False, True)]
    behind, ahead = (sim.simulate(WORKLOAD, machine, plan) for machine in machines)
    gathers = sum(bucket.gather.duration_ns for bucket in behind.stages[0].buckets) / 1e9
    assert ahead.duration_s == pytest.approx(behind.duration_s - gathers, rel=1e-3)


@pytest.mark.parametrize(("plan", "bytes_each"), [
    (Plan(num_microbatches=4), 18), (Plan(data=4, num_microbatches=4, gradient_sync="flat"), 18),
    (Plan(data=4, num_microbatches=4, sharding=Sharding(1)), 6 + 12 / 4),
    (Plan(data=4, num_microbatches=4, sharding=Sharding(3)), 18 / 4),
])  # fmt: skip
def test_gradients_in_flat_buffers_are_held_once(plan, bytes_each):
    """Bytes per parameter with sums in 32 bits, as Megatron-LM's documentation prints them for one rank and for d."""
    plan = replace(plan, precision=Precision("bfloat16", gradients="float32"))
    step = sim.simulate(WORKLOAD, replace(MACHINE, software=Software(flat_buffers=True)), plan)
    own, copied = step.memory, sim.simulate(WORKLOAD, MACHINE, plan).memory
    states = sum(own.of(kind) for kind in ("parameters", "gradients", "optimizer", "master weights"))
    assert states == pytest.approx(bytes_each * WORKLOAD.num_parameters, rel=1e-4)
    assert sim.memory_of(WORKLOAD, plan, software=Software(flat_buffers=True)).of("gradients") == own.of("gradients")
    if plan.sharding.stage < 3:
        assert own.of("buffers") == 0
        assert own.max_bytes <= copied.max_bytes
    if plan.data > 1 and plan.num_microbatches > 1 and plan.sharding.stage < 3:
        assert copied.max_bytes - own.max_bytes == pytest.approx(4 * WORKLOAD.num_parameters, rel=0.05)


def test_no_pass_is_shorter_than_its_host_needs():
    """A launch for each kernel; in 8 bits also for each product's input and parameter, and its output's gradient."""
    names = ("forward", "input_gradient", "weight_gradient")
    kernels = sum(getattr(layer, name).num_kernels for layer in WORKLOAD.layers for name in names)
    machine = replace(sim.cluster("dgx-h100", 1), software=Software(pass_launch_s=1.0))
    casts = 3 * sum(len(region.products) for layer in WORKLOAD.layers for region in layer.regions)
    for float8, launches in (("none", kernels), ("products", kernels + casts)):
        step = sim.simulate(WORKLOAD, machine, Plan(num_microbatches=2, float8=float8))
        assert step.duration_s == pytest.approx(2 * launches, rel=1e-3), float8


def test_stages_have_as_many_blocks_each_whatever_they_cost():
    heavy = sim.gpt_workload(hidden_size=256, num_layers=8, num_heads=4, sequence_length=128, vocab_size=50304)
    by_time, even = (sim.simulate(heavy, MACHINE, Plan(pipeline=4, num_microbatches=8, cut=cut)) for cut in CUTS)
    assert [len(stage.layers) for stage in even.stages] == [3, 2, 2, 3]
    assert len(by_time.stages[-1].layers) < 3  # the head is as much work as some blocks
    assert by_time.duration_s < even.duration_s
    assert [stage.kept.shape[0] for stage in sim.memory_of(heavy, even.plan).stages] == [3, 2, 2, 3]


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
        sent, sent_early, sent_once = (step.sent_bytes_by_axis["tensor"] for step in (whole, less, none))
        assert sent_early - sent_once == pytest.approx((sent - sent_once) / 2)  # one of a block's two sums
        assert saved > product_s
