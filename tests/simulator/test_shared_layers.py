"""Layers that ranks share: times and bytes of their passes, worked out by hand."""

from dataclasses import replace

import pytest

import simulator as sim
from distlab.plan import Contention, Link, Plan, Protocol, Work
from simulator.stage.parallel_passes import side_by_side
from simulator.units import to_ns
from tests.simulator.step_cases import DEVICE, LINK, cluster_of

B, S, H, A, V = 2, 64, 32, 4, 96
SIZES = {"hidden_size": H, "num_heads": A, "sequence_length": S, "vocab_size": V, "microbatch_size": B}
DENSE = sim.gpt_workload(num_layers=3, **SIZES)
MIXED = sim.mix_experts(sim.gpt_workload(num_layers=3, **SIZES), 4, top_k=2)
FREE = Link("free", (Protocol(0.0, 1e15),))
BLOCK = DENSE.layers[1]
STATES = 2 * B * S * H  # bytes of a tensor between two regions
NEAR = pytest.approx


def step_of(plan, workload=DENSE, **options):
    return sim.simulate(workload, cluster_of(64, **options), plan)


def seconds(work, factor=1.0):
    return sim.compute_s(work.times(factor), DEVICE)


def outside(name):
    inside = sum((getattr(region, name) for region in BLOCK.regions), Work())
    return getattr(BLOCK, name).without(inside)


def near(nanoseconds, expected_s):
    """Equal, but for the rounding of each of a handful of parts to a nanosecond."""
    return abs(nanoseconds - to_ns(expected_s)) <= 12


def test_tensor_parallel_divides_regions_and_sums_their_outputs():
    stage = step_of(Plan(tensor=2)).stages[0]
    inside = sum(sim.compute_s(region.forward.times(0.5), DEVICE) for region in BLOCK.regions)
    travel = sim.all_reduce_s(STATES, 2, LINK)
    assert near(stage.forward_ns[1], seconds(outside("forward")) + inside + 2 * travel)
    both = BLOCK.input_gradient + BLOCK.weight_gradient
    rest = both.without(outside("input_gradient")).without(outside("weight_gradient"))
    hidden = sum(min(travel, sim.compute_s(region.beside.times(0.5), DEVICE)) for region in BLOCK.regions)
    alone = (
        seconds(outside("input_gradient"))
        + seconds(outside("weight_gradient"))
        + sim.compute_s(rest.times(0.5), DEVICE)
    )
    assert near(stage.backward_ns[1], alone + 2 * travel - hidden)
    assert near(stage.passes_ns[2][1] + stage.passes_ns[3][1], alone + 2 * travel)


@pytest.mark.parametrize(
    ("ranks", "recompute", "elements", "split"),
    [(2, "none", 8, True), (4, "selective", 8, False), (4, "full", 12, True)],
)
def test_a_layer_sends_eight_times_its_states_or_twelve_with_full_recompute(ranks, recompute, elements, split):
    plan = Plan(tensor=ranks, recompute=recompute, sequence_parallel=split, num_microbatches=3)
    sent = step_of(plan).sent_bytes_by_axis["tensor"]
    share = 3 * (ranks - 1) / ranks
    ends = 4 * STATES + 12 * 2 * B * S  # embedding and head; the loss' three numbers a token, 4 bytes, twice around
    norms = (2 * 3 * 4 * H + S * H) * 2 if split else 0  # two sums of 2 H a layer; the positions' gradient
    assert sent == NEAR(share * (3 * elements * STATES + ends + norms), rel=1e-12)


@pytest.mark.parametrize("link", [LINK, FREE], ids=["slow", "free"])
def test_a_ring_hides_each_hop_behind_a_step_of_attention(link):
    ranks = 4
    stage = step_of(Plan(context=ranks), link=link).stages[0]
    attention = BLOCK.regions[0].attention
    part = sim.compute_s(attention.forward.times(1 / ranks**2), DEVICE)
    hop = sim.message_s(2 * STATES / ranks, link)
    expected = [*[max(part, hop)] * (ranks - 1), part]
    rest = BLOCK.forward.without(attention.forward).times(1 / ranks)
    assert near(stage.forward_ns[1], sim.compute_s(rest, DEVICE) + sum(expected))
    hops = [piece for piece in stage.calls[0][1] if piece.axis == "context"]
    assert [piece.num_bytes for piece in hops] == [2 * STATES // ranks] * (ranks - 1)
    back = [piece.num_bytes for piece in stage.calls[1][1]]
    assert sorted(back) == [2 * STATES // ranks] * (ranks - 1) + [4 * STATES // ranks] * (ranks - 1)


def test_all_to_alls_trade_positions_for_heads_before_and_after_attention():
    step = step_of(Plan(context=4, context_kind="all_to_all"))
    travel = sim.all_to_all_s(3 * STATES / 4, 4, LINK) + sim.all_to_all_s(STATES / 4, 4, LINK)
    assert near(step.stages[0].forward_ns[1], sim.compute_s(BLOCK.forward.times(0.25), DEVICE) + travel)
    assert step.sent_bytes_by_axis["context"] == NEAR(3 * 2 * 0.75 * STATES)  # layers, forward and backward


def test_experts_exchange_rows_twice_forward_and_twice_backward():
    ranks, block = 2, MIXED.layers[1]
    stage = step_of(Plan(expert=ranks), MIXED).stages[0]
    rows = block.experts.row_bytes
    assert rows == 2 * STATES  # two experts a token
    pieces = [piece for piece in stage.calls[0][1] if piece.axis == "expert"]
    assert [(piece.kind, piece.num_bytes) for piece in pieces] == [
        ("all_reduce", 8 * (2 * 4 + 1)),
        ("all_to_all", 8 * (4 + 4 * ranks)),
        ("all_to_all", rows),
        ("all_to_all", rows),
    ]
    travel = sum(sim.all_to_all_s(piece.num_bytes, ranks, LINK) for piece in pieces[1:])
    travel += sim.all_reduce_s(pieces[0].num_bytes, ranks, LINK)
    fewer = replace(block.forward, num_kernels=block.forward.num_kernels - 2 * block.experts.kernels_each)
    assert near(stage.forward_ns[1], sim.compute_s(fewer, DEVICE) + travel)
    back = [piece.num_bytes for piece in stage.calls[1][1] if piece.axis == "expert"]
    assert back == [rows, rows, 8 * (2 * 4 + 1)]


def test_experts_are_divided_and_have_fewer_copies():
    plan = Plan(data=2, expert=2)
    step = step_of(plan, MIXED)
    experts = sum(layer.expert_parameters for layer in MIXED.layers)
    assert step.stages[0].num_parameters == MIXED.num_parameters - experts // 2
    dense = (MIXED.num_parameters - experts) * 2
    assert step.sent_bytes_by_axis["data"] == NEAR(2 * 3 / 4 * dense + 2 * 1 / 2 * experts / 2 * 2)
    assert {sync.name.endswith("of experts") for sync in step.stages[0].buckets} == {True, False}
    held = [sim.memory_of(MIXED, Plan(expert=n)).of("parameters") for n in (1, 2, 4, 8)]
    assert held == [2 * (MIXED.num_parameters - experts + experts // n) for n in (1, 2, 4, 4)]


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("all_reduce", Plan(tensor=2)),
        ("all_gather", Plan(tensor=2, sequence_parallel=True)),
        ("reduce_scatter", Plan(tensor=2, sequence_parallel=True)),
        ("all_to_all", Plan(expert=2)),
        ("all_to_all", Plan(context=2, context_kind="all_to_all")),
        ("send", Plan(context=2)),
        ("send", Plan(pipeline=2)),
        ("all_reduce", Plan(data=2, gradient_sync="flat")),
    ],
)
def test_a_line_of_its_own_reaches_the_calls_of_every_axis(kind, plan):
    """A line for one kind: what a cluster whose links are all that line has in calls of the kind, and no more."""
    slow = Link("slow", (Protocol(1e-2, 1e6),))
    found = []
    for link, own in ((LINK, {kind: slow}), (slow, {kind: slow}), (LINK, {})):
        step = sim.simulate(MIXED, cluster_of(4, link=link, slow=link), plan, measured=sim.Measured(links=own))
        spans = [span for span in step.trace if span.kind == kind and span.num_bytes]
        found.append(sorted(round((span.end_ns - span.start_ns) / 1e3) for span in spans))
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0]
    assert sum(found[0]) > 2 * sum(found[2])


def test_contention_slows_what_runs_at_once():
    both = Contention(2.0, 1.5)
    assert side_by_side(100, 40, Contention()) == (100, 40)
    assert side_by_side(100, 40, both) == (130, 60)  # 60 at half speed: 30 done, 70 left
    assert side_by_side(10, 40, both) == (20, 47)  # 20 at two thirds: 13.3 done, 26.7 left
