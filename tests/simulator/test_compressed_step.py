"""Compression and accumulation in the simulator: what is sent and kept, when it is encoded, and where it pays."""

import math
from dataclasses import replace

import pytest
from step_cases import DEVICE, EACH, LINK, WORKLOAD, cluster_of, plan_of, workload_of

import simulator as sim
from distlab.plan import Link, Plan, Protocol
from distlab.plan.compression import METHODS, Compression, exchanges
from simulator.units import to_ns


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
    compression = Compression("quantize", bits=4)
    step = sim.simulate(WORKLOAD, cluster_of(4), plan_of(compression))
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
        step = sim.simulate(
            workload, cluster_of(8, per_node=per_node, slow=slow), Plan(data=data, compression=compression)
        )
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
    codec = sim.MeasuredCodec(compression, n, 1e-3, 1e-8, 2e-3, 3e-8)
    coded, counted = (
        sim.simulate(workload, machine, replace(plan, compression=compression), measured=each)
        for each in (sim.Measured(codec), sim.Measured())
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
    assert [p.latency_s for p in inside.intra_node.protocols] == [1e-6, 1e-7]
    assert inside.inter_node == slow
    across = sim.with_bandwidth(cluster_of(8, per_node=4, link=fast, slow=slow), Plan(data=8), 5e9)
    assert across.intra_node == fast
    assert [p.bytes_per_s for p in across.inter_node.protocols] == [5e9]
