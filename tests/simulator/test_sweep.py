"""When does compression pay? The break-even and the sweep of bandwidths."""

import math
from dataclasses import replace

import pytest
from step_cases import DEVICE, EACH, LINK, WORKLOAD, cluster_of, workload_of

from distlab.plan import Link, Plan, Protocol
from distlab.plan.compression import Compression, exchanges
from simulator import (
    MeasuredCodec,
    break_even_bytes_per_s,
    cluster,
    codec_work,
    compute_s,
    gpt_workload,
    simulate,
    sweep_compression,
    with_bandwidth,
)


def test_compression_pays_below_the_break_even_and_not_above():
    workload = gpt_workload(hidden_size=128, num_layers=2, num_heads=4, sequence_length=64, vocab_size=500)
    machine, plan = cluster("laptop", 4), Plan(data=4)
    for compression in (Compression("top_k", ratio=0.01), Compression("quantize", bits=2)):
        at = break_even_bytes_per_s(workload, machine, plan, compression)
        assert 1e5 < at < 1e15
        for factor in (0.97, 1.03):
            on = with_bandwidth(machine, plan, at * factor)
            plain = simulate(workload, on, plan).duration_s
            compressed = simulate(workload, on, replace(plan, compression=compression)).duration_s
            assert (compressed < plain) == (factor < 1)


def test_the_break_even_of_what_hides_nothing_is_the_closed_form():
    """One flat call: plain sends 2(n-1)/n G, sign (n-1) P; they cross where the bytes saved cost what coding does."""
    compression, n = Compression("sign"), 4
    workload, plan = workload_of(((1000, 1000),)), Plan(data=4, gradient_sync="flat")
    machine = cluster_of(n, link=Link("no latency", (Protocol(0.0, 1e9),)))
    payload = exchanges(compression, ((1000, 1000),))[0].num_bytes
    saved = 2 * (n - 1) / n * workload.gradient_bytes - (n - 1) * payload
    work = codec_work(compression, ((1000, 1000),), num_ranks=n)
    expected = saved / (compute_s(work.encode, DEVICE) + compute_s(work.decode, DEVICE))
    assert break_even_bytes_per_s(workload, machine, plan, compression) == pytest.approx(expected, rel=1e-4)


def test_what_never_pays_and_what_always_does():
    workload, machine = workload_of(((1000, 1000),)), cluster_of(16)
    assert break_even_bytes_per_s(workload, machine, Plan(data=16), Compression("quantize", bits=8)) == 0
    free = MeasuredCodec(Compression("random_k"), 16, 0.0, 0.0, 0.0, 0.0)
    assert break_even_bytes_per_s(workload, machine, Plan(data=16), Compression("random_k"), codec=free) in (
        math.inf,
        pytest.approx(1e15, rel=1),
    )


def test_the_sweep_has_every_line_at_every_bandwidth():
    sweep = sweep_compression(WORKLOAD, cluster_of(4), Plan(data=4), compressions=EACH, bytes_per_s=(1e9, 1e7, 1e8))
    assert sweep.bytes_per_s == (1e7, 1e8, 1e9)
    assert sweep.plain_s == tuple(sorted(sweep.plain_s, reverse=True))
    assert [len(line.duration_s) for line in sweep.lines] == [3] * len(EACH)
    assert sweep.alone_s < min(sweep.plain_s)


def test_the_bandwidth_changes_where_replicas_exchange_and_nowhere_else():
    fast, slow = Link("fast", (Protocol(1e-6, 1e10), Protocol(1e-7, 1e9))), LINK
    inside = with_bandwidth(cluster_of(8, per_node=8, link=fast, slow=slow), Plan(data=8), 5e9)
    assert [p.bytes_per_s for p in inside.intra_node.protocols] == [5e9, 5e8]
    assert [p.latency_s for p in inside.intra_node.protocols] == [1e-6, 1e-7]
    assert inside.inter_node == slow
    across = with_bandwidth(cluster_of(8, per_node=4, link=fast, slow=slow), Plan(data=8), 5e9)
    assert across.intra_node == fast
    assert [p.bytes_per_s for p in across.inter_node.protocols] == [5e9]
