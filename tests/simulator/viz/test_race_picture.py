"""Races, fitted lines and scaling curves say the figures that their numbers give, and judge claims by them."""

import math

import numpy as np
import pytest

from distlab.plan import Link, Plan, Protocol
from simulator import all_reduce_s, cluster, gpt_workload, hierarchical_all_reduce_s, link, simulate
from simulator.viz.collectives.race import race, race_takeaway
from simulator.viz.large_batch.scaling import NUM_RANKS, scaling

PLAIN = Link("plain", (Protocol(1e-5, 1e9),))


@pytest.mark.parametrize("num_ranks", [2, 3, 6, 8, 64])
@pytest.mark.parametrize("wire", [PLAIN, link("nvlink4"), link("infiniband-hdr"), link("ethernet-10g")])
def test_times_are_the_cost_models(num_ranks, wire):
    facts = race(wire, num_ranks)
    assert list(facts.times_s) == ["ring", "tree", "halving_doubling"]
    for name, times in facts.times_s.items():
        for index in (0, 180, -1):
            assert times[index] == pytest.approx(all_reduce_s(facts.sizes_bytes[index], num_ranks, wire, name))


def test_winners_cover_all_sizes_and_are_the_fastest():
    facts = race(PLAIN, 6, ("naive", "ring", "binomial_tree", "halving_doubling"))
    stretches = facts.stretches
    assert (stretches[0].first_bytes, stretches[-1].last_bytes) == (1e3, 1e9)
    assert [a.last_bytes for a in stretches[:-1]] == [b.first_bytes for b in stretches[1:]]
    for stretch in stretches:
        middle = math.sqrt(stretch.first_bytes * stretch.last_bytes)
        index = int(np.argmin(np.abs(np.log(facts.sizes_bytes / middle))))
        assert min(facts.times_s, key=lambda name: facts.times_s[name][index]) == stretch.algorithm


def test_the_crossing_is_where_the_lines_meet():
    facts = race(PLAIN, 8, ("tree", "ring"))
    # 14 a + 14/8 S/b = 6 a + 2 S/b: S = 8 a b / (1/4)
    assert facts.stretches[0].algorithm == "tree"
    assert facts.stretches[0].last_bytes == pytest.approx(8 * 1e-5 * 1e9 / 0.25, rel=2e-3)
    assert race_takeaway(facts) == "Double tree wins below 320 kB, ring above"


def test_of_equals_the_first_named_wins():
    assert [s.algorithm for s in race(PLAIN, 2, ("ring", "halving_doubling")).stretches] == ["ring"]
    assert [s.algorithm for s in race(PLAIN, 2, ("halving_doubling", "ring")).stretches] == ["halving_doubling"]


def test_nodes_slow_down_whoever_does_not_know_them():
    facts = race("nvlink4", 64, inter_node="infiniband-ndr")
    across = link("infiniband-ndr")
    assert facts.times_s["ring"][-1] == pytest.approx(all_reduce_s(1e9, 64, across))
    expected = hierarchical_all_reduce_s(1e9, 8, 8, intra_node=link("nvlink4"), inter_node=across)
    assert facts.times_s["hierarchical"][-1] == pytest.approx(expected)
    assert facts.stretches[-1].algorithm == "hierarchical"
    assert "hierarchical" not in race("nvlink4", 8, inter_node="infiniband-ndr").times_s


def seconds(num_ranks):
    return 1.0 if num_ranks == 1 else 1.25


def test_speed_up_of_seconds_is_of_equal_work_a_rank():
    (line,) = scaling({"": seconds})
    assert line.speed_up.tolist() == [1.0, *(pytest.approx(0.8 * n) for n in NUM_RANKS[1:])]
    assert line.efficiency.tolist() == [1.0, *[pytest.approx(0.8)] * 6]


def test_speed_up_of_simulated_steps_is_of_samples():
    sizes = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "sequence_length": 512, "vocab_size": 4096}

    def step(num_ranks):
        return simulate(gpt_workload(**sizes), cluster("dgx-a100", num_ranks), Plan(data=num_ranks))

    (line,) = scaling({"": step})
    expected = [step(n).samples_per_s / step(1).samples_per_s for n in NUM_RANKS]
    assert line.speed_up.tolist() == pytest.approx(expected)
    assert line.exposed[0] == 0
    assert line.exposed[-1] == pytest.approx(step(64).exposed_communication_s / step(64).duration_s)
