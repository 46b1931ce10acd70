"""Pictures of memory and of units: bars add up to the peaks, curves are the sweep's, the words say both."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from pen_facts import words, words_of
from picture_facts import with_gid
from sharding_cases import cluster_of, plan_of, workload_of

from distlab.plan import Plan, Sharding
from simulator import gpt_workload, memory_of, simulate, sweep_units
from simulator.memory.memory import KINDS
from simulator.units import format_bytes
from simulator.viz import (
    describe_measured_memory,
    describe_memory,
    describe_memory_of_plans,
    describe_sharding,
    draw_measured_memory,
    draw_memory,
    draw_memory_of_plans,
    draw_sharding,
    draw_timeline,
    to_png,
)
from simulator.viz.memory.memory import MEMORY_KINDS, fewer_moments

WORKLOAD = gpt_workload(hidden_size=256, num_layers=6, num_heads=4, sequence_length=64, vocab_size=1000)


def memory(**options):
    return memory_of(WORKLOAD, Plan(**options))


def test_every_kind_has_its_own_colour_and_letter():
    assert tuple(MEMORY_KINDS) == KINDS
    assert len({style.colour for style in MEMORY_KINDS.values()}) == len(KINDS)
    assert len({style.letter for style in MEMORY_KINDS.values()}) == len(KINDS)


def bar_widths(axes):
    (bars,) = (artist for artist in axes.collections if artist.get_gid() == "bars")
    return np.array([np.ptp(path.vertices[:4, 0]) for path in bars.get_paths()])


def test_bars_add_up_to_the_peaks():
    held = memory(pipeline=2, num_microbatches=4)
    bars, _ = draw_memory(held).axes
    widths = bar_widths(bars).reshape(-1, 2)
    np.testing.assert_allclose(widths.sum(axis=0), held.total_bytes)
    assert {format_bytes(total) for total in held.total_bytes} <= set(words(draw_memory(held)))


def test_the_curve_reaches_the_peak_of_the_fullest_stage():
    held = memory(pipeline=2, num_microbatches=4)
    _, over_time = draw_memory(held).axes
    tops = [max(line.get_ydata()) for line in over_time.lines]
    assert max(tops) == held.max_bytes
    assert any(text.startswith("work since") for text in words_of(over_time))


def test_capacity_is_drawn_where_it_is_near_and_said_anyway():
    held = memory()
    near, far = (draw_memory(held, capacity_bytes=factor * held.max_bytes) for factor in (1.1, 1000))
    assert len(near.axes[0].lines) == 1
    assert len(far.axes[0].lines) == 0
    assert "0.1 % of the device's" in far.texts[1].get_text()
    tight = draw_memory(held, capacity_bytes=0.9 * held.max_bytes)
    assert tight.texts[0].get_text().startswith("Does not fit: a rank needs")


def test_text_has_the_figures():
    held = memory(pipeline=2, num_microbatches=4)
    text = describe_memory(held, capacity_bytes=2 * held.max_bytes)
    assert f"Stage 0 of 2 peaks at {format_bytes(held.max_bytes)}" in text
    assert f"optimizer state {format_bytes(held.of('optimizer'))}" in text
    assert "50 % of the device's" in text
    assert "errors" not in text
    assert "Each rank peaks" in describe_memory(memory())


def test_plans_stand_side_by_side_and_the_title_says_which_fit():
    plans = {f"ZeRO-{stage}": memory(data=8, sharding=Sharding(stage)) for stage in range(4)}
    sizes = [plan.max_bytes for plan in plans.values()]
    figure = draw_memory_of_plans(plans, capacity_bytes=(sizes[2] + sizes[3]) / 2)
    widths = bar_widths(figure.axes[0]).reshape(-1, 4)
    np.testing.assert_allclose(widths.sum(axis=0), sizes)
    assert figure.texts[0].get_text() == f"Only ZeRO-3 fits in {format_bytes((sizes[2] + sizes[3]) / 2)}, " + (
        f"with {format_bytes(sizes[3])}"
    )
    text = describe_memory_of_plans(plans)
    assert text.startswith(f"ZeRO-3 holds {sizes[0] / sizes[3]:.3g} times less than ZeRO-0")
    assert all(f"{name}: {format_bytes(size)}" in text for name, size in zip(plans, sizes, strict=True))
    assert "No plan fits in 1 kB" in describe_memory_of_plans(plans, capacity_bytes=1000)
    assert "4 of 4 plans fit" in describe_memory_of_plans(plans, capacity_bytes=1e12)


def test_measured_stands_over_predicted_on_one_scale():
    predicted = memory().over_time()
    times, rows = predicted
    measured = (times * 3, (rows * 1.25).astype(np.int64))
    figure = draw_measured_memory(predicted, measured)
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim()
    assert first.get_title("left").startswith("measured")
    assert figure.texts[0].get_text().endswith("-20.0 %")
    text = describe_measured_memory(predicted, measured)
    assert "Most apart: optimizer state, measured" in text
    assert isinstance(figure, Figure)


def test_a_long_step_is_drawn_by_pixels_and_keeps_its_peak():
    times, rows = memory(num_microbatches=400).over_time()
    fewer, kept = fewer_moments(times, rows, 500)
    assert len(times) > 5000
    assert len(fewer) <= 502
    assert kept.max() == rows.max()
    assert (np.diff(fewer) > 0).all()


BLOCKS = workload_of([3.0] * 6, [40_000] * 6, ends=1000)
PLAN = plan_of(3, unit_layers=2)
SWEEP, STEP = sweep_units(BLOCKS, cluster_of(4), PLAN), simulate(BLOCKS, cluster_of(4), PLAN)


def line_of(figure, gid):
    (line,) = with_gid(figure, gid)
    return np.asarray(line.get_ydata())


def test_the_curves_are_the_sweeps():
    figure = draw_sharding(SWEEP, STEP)
    assert line_of(figure, "step") == pytest.approx(np.array(SWEEP.duration_s) * 1e3)
    assert line_of(figure, "memory") == pytest.approx(np.array(SWEEP.memory_bytes) / 1e6)
    assert to_png(figure).startswith(b"\x89PNG")


def test_the_text_names_the_chosen_size_and_the_best():
    text = describe_sharding(SWEEP, STEP)
    assert "Chosen: 2 layers per unit, 3 units" in text
    assert "Fastest: " in text
    assert "1 unit gathered ahead" in text


@pytest.mark.parametrize(
    "options", [{}, {"replicas": 2}, {"offload": "all"}, {"offload": "optimizer"}, {"prefetch": 0}]
)
def test_every_sharding_can_be_drawn(options):
    plan = plan_of(3, **options)
    step = simulate(BLOCKS, cluster_of(4), plan)
    assert draw_sharding(sweep_units(BLOCKS, cluster_of(4), plan, sizes=[1, 3]), step).axes
    assert draw_timeline(step.layer_trace).axes
    assert draw_timeline(step.trace).axes
