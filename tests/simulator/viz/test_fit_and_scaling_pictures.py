"""The fitted line and the scaling curve say the figures that their numbers give, and judge claims by them."""

import numpy as np
import pytest

from distlab.plan import Plan
from simulator import cluster, gpt_workload, simulate
from simulator.viz import describe_fit, describe_scaling, draw_fit, draw_scaling, to_png
from simulator.viz.large_batch.scaling import NUM_RANKS, scaling

SIZES = [10.0, 1e4, 1e6]


def on_line(factor=1.0):
    return [factor * (50e-6 + size / 2e9) for size in SIZES]


def words(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts] + [text.get_text() for text in figure.texts]


def test_a_fit_draws_its_points_its_line_and_the_size_of_half_the_bandwidth():
    figure = draw_fit(SIZES, on_line(), 50e-6, 2e9)
    axes = figure.axes[0]
    points = next(a for a in axes.collections if a.get_gid() == "points")
    assert points.get_offsets().tolist() == [[s, pytest.approx(t)] for s, t in zip(SIZES, on_line(), strict=True)]
    line = next(line for line in axes.lines if line.get_gid() == "line")
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], 1e-6, 1e9), "at least one"),
        (([1.0], [1.0, 2.0], 1e-6, 1e9), "1 sizes and 2 times"),
        (([1.0, 0.0], [1.0, 1.0], 1e-6, 1e9), "not a positive number"),
        (([1.0], [1.0], -1e-6, 1e9), "alpha_s is -1e-06"),
        (([1.0], [1.0], 1e-6, 0.0), "bandwidth in bytes per second"),
    ],
)
def test_what_is_no_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_fit(*arguments)


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
    assert said[-2] == "64 ranks are 16 to 51.2 times as fast as one"
    assert to_png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ({}, {}, "there is no line"),
        (lambda n: 0.0, {}, "a time above zero"),
        (seconds, {"claims": {"odd": (2, 3, 1)}}, "claim 'odd'"),
    ],
)
def test_what_cannot_scale_is_refused(lines, options, message):
    with pytest.raises(ValueError, match=message):
        draw_scaling(lines, **options)
