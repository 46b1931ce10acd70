"""Bubble against micro-batches, and against memory: equal lines are one, every schedule is in the words."""

import pytest

from distlab.plan import ActionTimes
from simulator.viz import (
    describe_bubbles,
    describe_memory_against_bubble,
    draw_bubbles,
    draw_memory_against_bubble,
    sweep_memory,
    sweep_microbatches,
)


def test_equal_lines_are_one_and_the_title_says_when_more_micro_batches_stop_helping():
    sweep = sweep_microbatches(4, ("naive", "gpipe", "one_f_one_b", "zb_h1"), (1, 4, 16, 64))
    assert sweep["gpipe"][2].bubble_fraction == pytest.approx(3 / 19)
    figure = draw_bubbles(sweep)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["naive model parallelism", "GPipe and 1F1B", "ZB-H1"]
    title, note = (text.get_text() for text in figure.texts)
    assert title == "ZB-H1 needs 16 micro-batches to be at most 10 % idle; GPipe and 1F1B need 64"
    assert "naive model parallelism 0.0, GPipe and 1F1B 11.3" in note
    assert "GPipe and 1F1B: 75.0 % with 1, 42.9 % with 4, 15.8 % with 16, 4.5 % with 64." in describe_bubbles(sweep)
    dear = sweep_microbatches(4, ("naive",), (2,), times=ActionTimes(1.0, 1.0, 1.0, 0.5))
    assert draw_bubbles(dear).texts[0].get_text() == "No schedule here gets below 10 % idle"


def test_a_point_a_schedule_and_the_automatic_curve_falls_with_memory():
    schedules, curve = sweep_memory(3, 9, ("gpipe", "one_f_one_b", "zb_h2", "v_min"), limits=(1, 2, 3, 4, 6))
    bubbles = [one.idle_of_span for one in curve]
    assert bubbles == sorted(bubbles, reverse=True)
    assert all(one.peak <= limit for one, limit in zip(curve, (1, 2, 3, 4, 6), strict=True))
    figure = draw_memory_against_bubble(schedules, curve)
    points = next(line for line in figure.axes[0].lines if line.get_gid() == "schedules")
    assert len(points.get_xdata()) == 4
    text = describe_memory_against_bubble(schedules, curve)
    for one in schedules.values():
        assert f"{one.name}: {one.peak:.4g} micro-batch" in text
    assert text.count("Automatic: ") == 5
    assert draw_memory_against_bubble({"gpipe": schedules["gpipe"]}).texts[0].get_text().startswith("GPipe is")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sweep_microbatches(4, ()), "nothing to sweep"),
        (lambda: sweep_microbatches(4, ("pipe",)), "choose one of naive"),
        (lambda: sweep_memory(4, 0), "no schedule has this size"),
        (lambda: draw_bubbles({}), "the sweep is empty"),
        (lambda: draw_memory_against_bubble({}), "there is no schedule"),
    ],
)
def test_what_cannot_be_drawn_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
