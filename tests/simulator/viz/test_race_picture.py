"""The race names the right winner at every size, and finds the sizes at which the winner changes."""

import math

import numpy as np
import pytest

from distlab.plan import Link, Protocol
from simulator import all_reduce_s, hierarchical_all_reduce_s, link
from simulator.viz import describe_race, draw_race, to_png
from simulator.viz.collectives.race import race, race_takeaway

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


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((PLAIN, 1), {}, "pass at least 2"),
        ((PLAIN, 4, ("rope",)), {}, "'rope'; choose of naive"),
        ((PLAIN, 4, ()), {}, "choose of"),
        (("string", 4), {}, "no preset 'string'"),
        ((PLAIN, 16, ("hierarchical",)), {}, "whole nodes"),
        ((PLAIN, 12, ("hierarchical",)), {"inter_node": PLAIN}, "a multiple of 8"),
        ((PLAIN, 4, ("ring",)), {"measured": {"tree": ([1.0], [1.0])}}, "'tree', which is not in the race"),
    ],
)
def test_what_cannot_race_is_refused_in_words(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        draw_race(*arguments, **options)
