"""Races, fitted lines and scaling curves say the figures that their numbers give, and judge claims by them."""

import math

import numpy as np
import pytest
from pen_facts import words
from picture_facts import with_gid

from distlab.plan import Link, Plan, Protocol
from simulator import all_reduce_s, cluster, gpt_workload, hierarchical_all_reduce_s, link, simulate
from simulator.viz import describe_fit, describe_race, describe_scaling, draw_fit, draw_race, draw_scaling, to_png
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


def test_the_picture_has_a_line_an_algorithm_a_band_and_measured_points():
    measured = {"ring": ([1e4, 1e6], [2e-4, 3e-3])}
    figure = draw_race(PLAIN, 8, ("ring", "tree"), measured=measured)
    lines = [line for line in figure.axes[0].lines if (line.get_gid() or "").startswith("line ")]
    assert [line.get_gid() for line in lines] == ["line ring", "line tree"]
    points = [a for a in figure.axes[0].collections if a.get_gid() == "measured ring"]
    assert points[0].get_offsets().tolist() == [[1e4, 2e-4], [1e6, 3e-3]]
    assert [patch.get_x() for patch in figure.axes[1].patches] == [1e3, pytest.approx(320e3, rel=2e-3)]
    assert figure.texts[0].get_text() == "Double tree wins below 320 kB, ring above"
    assert to_png(figure).startswith(b"\x89PNG")


def test_text_gives_the_error_of_the_prediction():
    exact = [all_reduce_s(size, 8, PLAIN) for size in (1e4, 1e6, 1e8)]
    assert "off by 0 %" in describe_race(PLAIN, 8, measured={"ring": ([1e4, 1e6, 1e8], exact)})
    half = [2 * seconds for seconds in exact]
    assert "off by 50 %" in describe_race(PLAIN, 8, measured={"ring": ([1e4, 1e6, 1e8], half)})


SIZES = [10.0, 1e4, 1e6]


def on_line(factor=1.0):
    return [factor * (50e-6 + size / 2e9) for size in SIZES]


def test_a_fit_draws_its_points_its_line_and_the_size_of_half_the_bandwidth():
    figure = draw_fit(SIZES, on_line(), 50e-6, 2e9)
    (points,) = with_gid(figure, "points")
    assert points.get_offsets().tolist() == [[s, pytest.approx(t)] for s, t in zip(SIZES, on_line(), strict=True)]
    (line,) = with_gid(figure, "line")
    x, y = line.get_data()
    np.testing.assert_allclose(y, 50e-6 + x / 2e9)
    said = words(figure)
    assert "A message costs 50 us and 500 us for each MB" in said
    assert "100 kB: half of the time is latency" in said
    assert {"latency alone: 50 us", "50 us + size / (2 GB/s)"} <= set(said)


def test_a_fit_says_how_far_off_it_is():
    assert "0 % off the points" in describe_fit(SIZES, on_line(), 50e-6, 2e9)
    text = describe_fit(SIZES, [*on_line()[:2], 2 * on_line()[2]], 50e-6, 2e9)
    assert "Furthest off at 1 MB: measured 1.1 ms, the line says -50 %" in text
    assert "20 % off the points" in describe_fit(SIZES, on_line(1.25), 50e-6, 2e9)


def test_no_latency_draws_no_half():
    figure = draw_fit(SIZES, [s / 1e9 for s in SIZES], 0.0, 1e9)
    assert not [text for text in words(figure) if "latency alone" in text]
    assert to_png(figure).startswith(b"\x89PNG")


def seconds(num_ranks):
    return 1.0 if num_ranks == 1 else 1.25


def test_speed_up_of_seconds_is_of_equal_work_a_rank():
    (line,) = scaling(seconds)
    assert line.speed_up.tolist() == [1.0, *(pytest.approx(0.8 * n) for n in NUM_RANKS[1:])]
    assert line.efficiency.tolist() == [1.0, *[pytest.approx(0.8)] * 6]


def test_speed_up_of_simulated_steps_is_of_samples():
    sizes = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "sequence_length": 512, "vocab_size": 4096}

    def step(num_ranks):
        return simulate(gpt_workload(**sizes), cluster("dgx-a100", num_ranks), Plan(data=num_ranks))

    (line,) = scaling(step)
    expected = [step(n).samples_per_s / step(1).samples_per_s for n in NUM_RANKS]
    assert line.speed_up.tolist() == pytest.approx(expected)
    assert line.exposed[0] == 0
    assert line.exposed[-1] == pytest.approx(step(64).exposed_communication_s / step(64).duration_s)
    assert "of the step waits for communication" in describe_scaling(step)


def test_claims_are_judged():
    claims = {"8 give 6-7x": (8, 6.0, 7.0), "doubling gives 1.7x": (2, 1.7, 1.7), "4 give 2x": (4, 2, 2)}
    text = describe_scaling({"a": seconds}, claims=claims)
    assert "'8 give 6-7x' on a: holds: 6.40x." in text
    assert "'doubling gives 1.7x' on a: is too high: 1.60x." in text
    assert "'4 give 2x' on a: is too low: 3.20x." in text
    assert "64 ranks are 51.2 times as fast as one: 80 % efficient" in text


def test_a_claim_at_the_edge_of_what_it_rounds_to_holds():
    assert "holds: 1.60x" in describe_scaling(seconds, claims={"1.6x": (2, 1.6, 1.6)})


def test_the_picture_has_two_lines_a_name_and_the_claims():
    lines = {"fast": seconds, "slow": lambda n: 1.0 if n == 1 else 4.0}
    figure = draw_scaling(lines, claims={"8 give 6-7x": (8, 6, 7)})
    gids = [line.get_gid() for axes in figure.axes for line in axes.lines if line.get_gid()]
    named = [gid for gid in gids if gid.startswith(("speed", "eff"))]
    assert named == ["speed-up fast", "speed-up slow", "efficiency fast", "efficiency slow"]
    said = words(figure)
    assert {"80 %  fast", "25 %  slow", "a  claim: 8 give 6-7x"} <= set(said)
    assert said[0] == "64 ranks are 16 to 51.2 times as fast as one"
    assert to_png(figure).startswith(b"\x89PNG")
