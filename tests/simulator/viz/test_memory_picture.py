"""The memory picture: bars add up to the peaks, the curve to the moments, the words to both."""

import numpy as np
import pytest

from simulator.memory import KINDS, Memory
from simulator.viz import describe_memory, draw_memory, to_png


def two_stages():
    peak = np.array([[4, 4, 8, 6, 0, 0], [3, 3, 6, 2, 1, 0]], np.int64) * 1_000_000
    starts = (np.array([0, 10, 20]), np.array([10, 30, 50]))
    ends = (np.array([60, 70, 80]), np.array([20, 40, 60]))
    return Memory(peak, starts, ends, (2_000_000, 2_000_000))


def test_bars_add_up_to_the_peaks():
    bars, _ = draw_memory(two_stages()).axes
    widths = np.array([patch.get_width() for patch in bars.patches]).reshape(-1, 2)
    np.testing.assert_allclose(widths.sum(axis=0), two_stages().total_bytes)
    assert {"22 MB", "15 MB"} <= {text.get_text() for text in bars.texts}


def test_the_curve_reaches_the_peak_of_the_fullest_stage():
    _, over_time = draw_memory(two_stages()).axes
    tops = [max(line.get_ydata()) for line in over_time.lines]
    assert max(tops) == two_stages().max_bytes == 22_000_000
    assert len(tops) == np.count_nonzero(two_stages().peak_bytes[0])


def test_capacity_is_drawn_where_it_is_near_and_said_anyway():
    near, far = draw_memory(two_stages(), capacity_bytes=24e6), draw_memory(two_stages(), capacity_bytes=24e9)
    assert len(near.axes[0].lines) == 1
    assert len(far.axes[0].lines) == 0
    assert "0.1 % of the device's 24 GB" in far.texts[1].get_text()
    assert draw_memory(two_stages(), capacity_bytes=20e6).texts[0].get_text().startswith("Does not fit: stage 0 needs")


def test_text_has_the_figures():
    text = describe_memory(two_stages(), capacity_bytes=44e6)
    for part in (
        "Stage 0 of 2 peaks at 22 MB",
        "activations 6 MB",
        "stage 1, peaks at 15 MB",
        "50 % of the device's 44 MB",
    ):
        assert part in text
    assert "buckets" not in text
    assert KINDS[-2:] == ("buckets", "errors")


def test_png_follows_the_data_and_one_stage_is_enough():
    both = two_stages()
    one = Memory(both.peak_bytes[:1], both.start_ns[:1], both.end_ns[:1], both.activation_bytes[:1])
    assert to_png(draw_memory(one)) != to_png(draw_memory(both))
    assert "Each rank peaks" in describe_memory(one)


def test_a_capacity_of_nothing_is_refused():
    with pytest.raises(ValueError, match="above zero"):
        draw_memory(two_stages(), capacity_bytes=0)
