"""Layers that ranks share, and compressed gradients: times and bytes of passes and calls, worked out by hand."""

import math
from dataclasses import replace

import pytest
from step_cases import DEVICE, EACH, LINK, WORKLOAD, cluster_of, plan_of, workload_of

import simulator as sim
from distlab.plan import Contention, Link, Plan, Protocol, Sharding, Work
from distlab.plan.compression import METHODS, Compression, exchanges
from simulator.hardware.rank_layout import EXPERT_COPIES, RankLayout
from simulator.memory.memory import KINDS
from simulator.models.parts import load_experts
from simulator.stage.parallel_passes import side_by_side
from simulator.units import to_ns

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
    return getattr(BLOCK, name).without(sum((getattr(region, name) for region in BLOCK.regions), Work()))


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
    alone = seconds(outside("input_gradient")) + seconds(outside("weight_gradient")) + seconds(rest, 0.5)
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
    part, hop = sim.compute_s(attention.forward.times(1 / ranks**2), DEVICE), sim.message_s(2 * STATES / ranks, link)
    expected = [*[max(part, hop)] * (ranks - 1), part]
    rest = BLOCK.forward.without(attention.forward).times(1 / ranks)
    assert near(stage.forward_ns[1], sim.compute_s(rest, DEVICE) + sum(expected))
    hops = [piece for piece in stage.calls[0][1] if piece.axis == "context"]
    assert [piece.num_bytes for piece in hops] == [2 * STATES // ranks] * (ranks - 1)
    back = sorted(piece.num_bytes for piece in stage.calls[1][1])
    assert back == [2 * STATES // ranks] * (ranks - 1) + [4 * STATES // ranks] * (ranks - 1)


def test_software_that_repeats_keys_and_values_for_all_heads_sends_them_so():
    model, stacks = sim.model_by_name("llama-3-8b"), ("eager-fsdp", "compiled-fsdp")
    steps = [sim.simulate(model, sim.cluster("dgx-h100", 4, stack=name), Plan(context=4)) for name in stacks]
    assert steps[1].sent_bytes_by_axis["context"] == NEAR(32 / 8 * steps[0].sent_bytes_by_axis["context"])


def test_all_to_alls_trade_positions_for_heads_before_and_after_attention():
    step = step_of(Plan(context=4, context_kind="all_to_all"))
    travel = sim.all_to_all_s(3 * STATES / 4, 4, LINK) + sim.all_to_all_s(STATES / 4, 4, LINK)
    assert near(step.stages[0].forward_ns[1], sim.compute_s(BLOCK.forward.times(0.25), DEVICE) + travel)
    assert step.sent_bytes_by_axis["context"] == NEAR(3 * 2 * 0.75 * STATES)  # layers, forward and backward


def test_keys_and_values_are_gathered_before_attention_and_their_gradients_scattered_after_it():
    step = step_of(plan := Plan(context=4, context_kind="all_gather"))
    travel = sim.all_gather_s(2 * STATES, 4, LINK)
    assert near(step.stages[0].forward_ns[1], sim.compute_s(BLOCK.forward.times(0.25), DEVICE) + travel)
    calls = [(call.kind, call.num_bytes) for call in step.stages[0].calls[1][1]]
    assert calls == [("all_gather", 2 * STATES), ("reduce_scatter", 2 * STATES)]
    assert sim.memory_of(DENSE, plan).stages[0].backward[1, KINDS.index("buffers")] == 2 * 2 * STATES


def test_experts_exchange_rows_twice_forward_and_twice_backward():
    ranks, block = 2, MIXED.layers[1]
    stage = step_of(Plan(expert=ranks), MIXED).stages[0]
    rows = block.experts.row_bytes
    assert rows == 2 * STATES  # two experts a token
    pieces = [piece for piece in stage.calls[0][1] if piece.axis == "expert"]
    counts, sizes = ("all_reduce", 8 * (2 * 4 + 1)), ("all_to_all", 8 * (4 + 4 * ranks))
    assert [(piece.kind, piece.num_bytes) for piece in pieces] == [counts, sizes, *[("all_to_all", rows)] * 2]
    travel = sum(sim.all_to_all_s(piece.num_bytes, ranks, LINK) for piece in pieces[1:])
    travel += sim.all_reduce_s(pieces[0].num_bytes, ranks, LINK)
    fewer = replace(block.forward, num_kernels=block.forward.num_kernels - 2 * block.experts.kernels_each)
    assert near(stage.forward_ns[1], sim.compute_s(fewer, DEVICE) + travel)
    assert [piece.num_bytes for piece in stage.calls[1][1] if piece.axis == "expert"] == [rows, rows, 8 * (2 * 4 + 1)]


def test_the_fullest_rank_has_the_rows_of_as_many_more_experts_a_token():
    """Half as many rows more are what three experts a token make of two; utilization counts the even ones."""
    loaded, three = load_experts(MIXED, 1.5), sim.mix_experts(DENSE, 4, top_k=3)
    known = {"experts": replace(three.layers[1].experts, top_k=2)}
    assert replace(loaded.layers[1], uncounted_flops=0.0) == replace(three.layers[1], **known)
    assert load_experts(MIXED, 1.0) == MIXED
    assert loaded.counted_flops == NEAR(MIXED.counted_flops)
    with pytest.raises(ValueError, match="has no experts, whose load is given; leave it out"):
        load_experts(DENSE, 1.5)
    said = sim.ModelDescription(num_experts=4, top_k=2, capacity_factor=1.25)
    assert said.workload() == replace(said, capacity_factor=None, expert_load=1.25).workload()


def test_experts_are_divided_and_have_fewer_copies():
    step = step_of(Plan(data=2, expert=2), MIXED)
    experts = sum(layer.expert_parameters for layer in MIXED.layers)
    assert step.stages[0].num_parameters == MIXED.num_parameters - experts // 2
    dense = (MIXED.num_parameters - experts) * 2
    assert step.sent_bytes_by_axis["data"] == NEAR(2 * 3 / 4 * dense + 2 * 1 / 2 * experts / 2 * 2)
    assert {sync.name.endswith("of experts") for sync in step.stages[0].buckets} == {True, False}
    held = [sim.memory_of(MIXED, Plan(expert=n)).of("parameters") for n in (1, 2, 4, 8)]
    assert held == [2 * (MIXED.num_parameters - experts + experts // n) for n in (1, 2, 4, 4)]


def test_fsdp_shards_experts_over_the_ranks_that_have_copies_of_them():
    plan = Plan(data=2, expert=2, sharding=Sharding(3))
    step, experts = step_of(plan, MIXED), sum(layer.expert_parameters for layer in MIXED.layers)
    dense, own = MIXED.num_parameters - experts, experts / 2
    assert step.sent_bytes_by_axis["data"] == NEAR(3 * 2 * (dense * 3 / 4 + own / 2), rel=1e-3)
    assert step.memory.of("optimizer") == NEAR(8 * (dense / 4 + own / 2), rel=1e-3)
    alone = sim.memory_of(MIXED, Plan(expert=2, sharding=Sharding(3))).of("optimizer")
    assert alone == NEAR(8 * (dense / 2 + own), rel=1e-3), "nobody else has these experts"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_folded_experts_divide_the_ranks_of_a_stage(stage):
    """Without tensor and context ranks the same step as of fewer data ranks; with them neighbours hold all experts."""
    own = {"pipeline": 2, "num_microbatches": 2, "sharding": Sharding(stage)}
    folded, plain = (step_of(Plan(data=n, expert=2, fold_experts=n > 2, **own), MIXED, per_node=2) for n in (4, 2))
    assert (folded.duration_s, folded.sent_bytes_by_axis) == (plain.duration_s, plain.sent_bytes_by_axis)
    assert folded.memory.peak_bytes.tolist() == plain.memory.peak_bytes.tolist()
    plan = Plan(2, **own, tensor=2, context=2, expert=4, sequence_parallel=True, fold_experts=True)
    layout, step = RankLayout(cluster_of(16), plan), step_of(plan, MIXED)
    assert layout.rows(("expert",)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.rows(EXPERT_COPIES) == tuple((n, n + 4) for n in range(4))
    assert (plan.world_size, plan.copies, plan.expert_copies, plan.num_replicas) == (16, 4, 2, 2)
    rows = MIXED.layers[1].experts.row_bytes / 4  # of a rank's quarter of a micro-batch
    sent = [piece.num_bytes for piece in step.stages[0].calls[0][1] if piece.name.startswith("all_to_all rows")]
    assert sent == [rows, rows]
    experts, tensor = (sum(getattr(layer, f"{of}_parameters") for layer in MIXED.layers) for of in ("expert", "tensor"))
    held = MIXED.num_parameters - experts * 3 // 4 - tensor // 2
    assert sum(part.num_parameters for part in step.stages) == held


@pytest.mark.parametrize(("kind", "plan"), [
    ("all_reduce", Plan(tensor=2)), ("all_gather", Plan(tensor=2, sequence_parallel=True)),
    ("reduce_scatter", Plan(tensor=2, sequence_parallel=True)), ("all_to_all", Plan(expert=2)),
    ("all_to_all", Plan(context=2, context_kind="all_to_all")), ("send", Plan(context=2)),
    ("send", Plan(pipeline=2)), ("all_reduce", Plan(data=2, gradient_sync="flat")),
])  # fmt: skip
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


@pytest.mark.parametrize("compression", EACH, ids=METHODS)
def test_a_rank_sends_what_exchanges_says(compression):
    num_ranks = 3
    step = sim.simulate(WORKLOAD, cluster_of(8), plan_of(compression, data=num_ranks))
    shapes = [shape for layer in WORKLOAD.layers for shape in layer.shapes]
    total, where = 0.0, len(shapes)
    for sync in step.stages[0].buckets:  # buckets take the parameters from the last on
        count = next(n for n in range(1, where + 1) if _bytes(shapes[where - n : where]) == sync.gradient_bytes)
        bucket = shapes[where - count : where][::-1]
        where -= count
        for kind, num_bytes in exchanges(compression, bucket):
            total += num_bytes * (num_ranks - 1 if kind == "all_gather" else 2 * (num_ranks - 1) / num_ranks)
    assert where == 0
    assert step.sent_bytes_per_rank == pytest.approx([total] * num_ranks)
    sent = [span for span in step.trace if span.rank == 0 and span.kind in ("all_gather", "all_reduce")]
    assert {span.kind for span in sent} == {exchanges(compression, shapes)[0].kind}
    assert {span.lane for span in sent} == {"communication"}


def _bytes(shapes):
    return 4 * sum(math.prod(shape) for shape in shapes)


def test_a_bucket_is_encoded_when_full_then_sent_then_decoded():
    step = sim.simulate(WORKLOAD, cluster_of(4), plan_of(Compression("quantize", bits=4)))
    spans = [span for span in step.layer_trace if span.rank == 0]
    passes = {span.name: span for span in spans}
    for index, sync in enumerate(step.stages[0].buckets):
        encode, send, decode = (passes[f"{verb} bucket {index}"] for verb in ("encode", "all_gather", "decode"))
        assert (encode.lane, encode.kind, decode.lane, decode.kind) == ("compute", "encode", "compute", "decode")
        assert encode.start_ns >= passes[f"backward layer {sync.layer}"].end_ns
        assert encode.end_ns <= send.start_ns < send.end_ns <= decode.start_ns
        assert decode.end_ns <= to_ns(step.duration_s)
    last = max(span.end_ns for span in spans if span.kind == "B")
    assert passes["encode bucket 0"].end_ns < last  # and the rest of backward goes on while it travels
    assert min(span.start_ns for span in spans if span.kind == "decode") >= last


def test_powersgd_sends_its_second_factor_while_the_rank_waits():
    compression = Compression("powersgd", rank=2)
    step = sim.simulate(WORKLOAD, cluster_of(4), plan_of(compression))
    spans = sorted((s for s in step.layer_trace if s.rank == 0), key=lambda span: span.start_ns)
    first = [s for s in spans if s.kind == "all_reduce" and "second" not in s.name]
    second = [s for s in spans if s.kind == "all_reduce" and "second" in s.name]
    made = [s for s in spans if s.name.startswith("encode second")]
    assert len(first) == len(second) == len(made) == len(step.stages[0].buckets) >= 2
    assert made[0].start_ns >= max(s.end_ns for s in first)  # as the hook: all first answers, then all second messages
    assert all(a.end_ns <= b.start_ns for a, b in zip(made, second, strict=True))
    assert second[0].start_ns < made[-1].end_ns  # one travels while the next is made
    shapes = ((300, 200), (300,))
    one = sim.simulate(workload_of(shapes), cluster_of(4), Plan(data=4, compression=compression))
    sent = [s.num_bytes for s in one.trace if s.rank == 0 and s.kind == "all_reduce"]
    assert sent == [call.num_bytes for call in exchanges(compression, shapes)]


@pytest.mark.parametrize(
    ("compression", "encode_passes", "decode_passes"),
    [  # passes over the bucket, by the table of simulator.gradients.compression; n = 3 ranks; k is a tenth
        (Compression("top_k", ratio=0.1), 11 + 3, 1 + 3 + 3 * 3 * 0.1),
        (Compression("random_k", ratio=0.1, error_feedback=False), 1, 1 + 3 * 0.1),
        (Compression("quantize", bits=8), 9 + 3, 1 + 3 + 3 * 8),
        (Compression("quantize", bits=4), 9 + 2 + 3, 1 + 3 + 3 * 10),
        (Compression("sign", error_feedback=False), 4 + 2, 1 + 3 * 10),
    ],
)
def test_passes_are_those_of_the_table(compression, encode_passes, decode_passes):
    work = sim.codec_work(compression, ((100, 100),), num_ranks=3)
    assert work.encode.memory_bytes == pytest.approx(encode_passes * 40_000)
    assert work.decode.memory_bytes == pytest.approx(decode_passes * 40_000)
    assert work.encode.matmul_flops == work.between.matmul_flops == 0
    work = sim.codec_work(Compression("powersgd", rank=4), ((300, 200), (10,)), num_ranks=3)
    product = 2 * 4 * 300 * 200
    flops = [part.matmul_flops for part in (work.encode, work.between, work.after, work.decode)]
    assert flops == [product, product + 4 * 4 * 4 * 300, product, product]


def test_nodes_gather_by_one_ring():
    slow = Link("network", (Protocol(1e-4, 1e7),))
    compression = Compression("sign")
    workload = workload_of(((512, 512),))
    payload = exchanges(compression, ((512, 512),))[0].num_bytes
    cases = ((8, 8, sim.all_gather_s(8 * payload, 8, LINK)), (6, 4, sim.all_gather_s(6 * payload, 6, slow)))
    for data, per_node, expected in cases:
        machine = cluster_of(8, per_node=per_node, slow=slow)
        step = sim.simulate(workload, machine, Plan(data=data, compression=compression))
        assert step.stages[0].buckets[0].duration_ns == to_ns(expected)
    step = sim.simulate(workload, cluster_of(8, per_node=4, slow=slow), Plan(data=8, compression=compression))
    expected = sim.ring_over_nodes_s(8 * payload, 4, 2, intra_node=LINK, inter_node=slow)
    assert step.stages[0].buckets[0].duration_ns == to_ns(expected)
    assert expected == pytest.approx(1e-4 + 6 * 1e-5 + 7 * payload / 4 / 1e7)


def test_the_break_even_of_what_hides_nothing_is_the_closed_form():
    """One flat call: plain sends 2(n-1)/n G, sign (n-1) P; they cross where the bytes saved cost what coding does."""
    compression, n = Compression("sign"), 4
    workload, plan = workload_of(((1000, 1000),)), Plan(data=4, gradient_sync="flat")
    machine = cluster_of(n, link=Link("no latency", (Protocol(0.0, 1e9),)))
    payload = exchanges(compression, ((1000, 1000),))[0].num_bytes
    saved = 2 * (n - 1) / n * workload.gradient_bytes - (n - 1) * payload
    work = sim.codec_work(compression, ((1000, 1000),), num_ranks=n)
    expected = saved / (sim.compute_s(work.encode, DEVICE) + sim.compute_s(work.decode, DEVICE))
    assert sim.break_even_bytes_per_s(workload, machine, plan, compression) == pytest.approx(expected, rel=1e-4)
    coded, counted = (
        sim.simulate(workload, machine, replace(plan, compression=compression), measured=each)
        for each in (sim.Measured(sim.MeasuredCodec(compression, n, 1e-3, 1e-8, 2e-3, 3e-8)), sim.Measured())
    )
    both = sim.compute_s(work.encode, DEVICE) + sim.compute_s(work.decode, DEVICE)
    assert coded.duration_s - counted.duration_s == pytest.approx(3e-3 + 4e-8 * 4e6 - both, abs=5e-9)
    sweep = sim.sweep_compression(workload, machine, plan, compressions=EACH[:2], bytes_per_s=(1e9, 1e7, 1e8))
    assert sweep.bytes_per_s == (1e7, 1e8, 1e9)
    assert sweep.plain_s == tuple(sorted(sweep.plain_s, reverse=True))
    assert [len(line.duration_s) for line in sweep.lines] == [3, 3]
    assert sweep.alone_s < min(sweep.plain_s)


def test_the_bandwidth_changes_where_replicas_exchange_and_nowhere_else():
    fast, slow = Link("fast", (Protocol(1e-6, 1e10), Protocol(1e-7, 1e9))), LINK
    inside = sim.with_bandwidth(cluster_of(8, per_node=8, link=fast, slow=slow), Plan(data=8), 5e9)
    assert [p.bytes_per_s for p in inside.intra_node.protocols] == [5e9, 5e8]
    assert ([p.latency_s for p in inside.intra_node.protocols], inside.inter_node) == ([1e-6, 1e-7], slow)
    across = sim.with_bandwidth(cluster_of(8, per_node=4, link=fast, slow=slow), Plan(data=8), 5e9)
    assert (across.intra_node, [p.bytes_per_s for p in across.inter_node.protocols]) == (fast, [5e9])
