"""Stage 3 over nodes: one ring of all ranks, tensors gathered one by one, and a limit on what is gathered ahead."""

from dataclasses import replace

import pytest

from distlab.plan import Link, Plan, Protocol, Sharding
from simulator import cluster, gpt_workload, ring_over_nodes_s, simulate, stack
from simulator.hardware.process_groups import group_of
from simulator.units import to_ns
from simulator.validation.a100 import fsdp_paper, zero_three

INSIDE, ACROSS = Link("inside", (Protocol(1e-6, 1e11),)), Link("across", (Protocol(1e-5, 1e10),))
GPT = gpt_workload(hidden_size=1024, num_layers=4, num_heads=8, sequence_length=256, vocab_size=1024)


def test_latencies_of_a_ring_grow_with_its_ranks_and_wires_work_at_once():
    links = {"intra_node": INSIDE, "inter_node": ACROSS}
    assert ring_over_nodes_s(0, 8, 48, **links) == pytest.approx(47 * 1e-5 + 336 * 1e-6)
    whole = 8e9  # across: an eighth per rank at a tenth of the rate inside
    latencies = 3 * 1e-5 + 28 * 1e-6
    assert ring_over_nodes_s(whole, 8, 4, **links) == pytest.approx(
        latencies + 31 / 32 * max(whole / 8e10, whole / 1e11)
    )
    assert ring_over_nodes_s(whole, 1, 4, **links) == pytest.approx(3 * 1e-5 + 0.75 * whole / 1e10)
    machine = replace(cluster("dgx-a100", 32), intra_node=INSIDE, inter_node=ACROSS)
    group = group_of(machine, range(32))
    assert group.exchange_ns("all_gather", whole / 32) == to_ns(ring_over_nodes_s(whole, 8, 4, **links))
    assert group.exchange_ns("reduce_scatter", whole) == to_ns(ring_over_nodes_s(whole, 8, 4, **links))


def test_tensors_gathered_one_by_one_pay_a_ring_and_a_slice_for_each_rank():
    plan = Plan(data=32, sharding=Sharding(3))
    flat, listed = (replace(cluster("dgx-a100", 32), slice_s=each) for each in (0.0, 1e-5))
    before, after = (simulate(GPT, machine, plan).stages[0].units[1] for machine in (flat, listed))
    tensors = len(before.unit.sizes)
    for one, other in ((before.gather, after.gather), (before.scatter[0], after.scatter[0])):
        assert other.duration_ns > one.duration_ns + tensors * 32 * 1e-5 * 1e9
        assert other.sent_bytes == pytest.approx(one.sent_bytes, rel=1e-3)


def test_nothing_is_gathered_ahead_beyond_the_limit():
    machine = cluster("dgx-a100", 32)
    size = simulate(GPT, machine, Plan(data=32, sharding=Sharding(3))).stages[0].units[1].unit.num_elements
    for live, prefetch in ((1.5 * size, 0), (2 * size, 1), (3 * size, 2), (None, 3)):
        limited = simulate(GPT, replace(machine, live_elements=live), Plan(data=32, sharding=Sharding(3, prefetch=3)))
        free = simulate(GPT, machine, Plan(data=32, sharding=Sharding(3, prefetch=prefetch)))
        assert limited.duration_s == free.duration_s


def test_published_steps_of_stage_3_over_many_nodes():
    """DeepSpeed on 384 GPUs, FSDP on 256; by flat gathers ahead the former is far too short."""
    (case,) = zero_three()
    assert case.predict_s() == pytest.approx(case.measured_s, rel=0.08)
    assert case.predict_s(replace(stack(case.stack), slice_s=0.0, live_elements=None)) < 0.75 * case.measured_s
    for one in fsdp_paper():
        assert one.predict_s() == pytest.approx(one.measured_s, rel=0.05)
