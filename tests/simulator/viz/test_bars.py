"""The picture of bars shows every number that it was given, from zero, and says it in words."""

import math

import pytest

from simulator.viz import describe_bars, draw_bars, to_png

PLAIN = {"ring": 24.0, "tree": 6.0}
SERIES = {"flat": {"predicted": 61.0, "measured": 66.0}, "overlapped": {"predicted": 40.0, "measured": 55.5}}


def test_each_number_is_a_bar_from_zero_with_its_number_at_the_end():
    axes = draw_bars(PLAIN, unit="messages", title="A ring sends more messages").axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0.0, 24.0), (0.0, 6.0)]
    assert {"24 messages", "6 messages"} <= {text.get_text() for text in axes.texts}
    assert axes.get_xlim()[0] == 0.0


def test_series_have_colours_of_their_own_and_stand_in_the_order_given():
    axes = draw_bars(SERIES, unit="ms", title="The ladder").axes[0]
    widths = [bar.get_width() for bar in axes.patches]
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert widths == [61.0, 66.0, 40.0, 55.5]
    assert colours[0] == colours[2] != colours[1] == colours[3]
    middles = [bar.get_y() + bar.get_height() / 2 for bar in axes.patches]
    assert middles == sorted(middles)


def test_words_say_the_same():
    assert describe_bars(PLAIN, unit="messages", title="Few").startswith("Few. ring: 24 messages; tree: 6")
    assert describe_bars({"a": 0.01234, "b": 1234.5}, unit="ms", title="T") == "T. a: 0.0123 ms; b: 1,234 ms."
    assert "flat: predicted 61 ms, measured 66 ms" in describe_bars(SERIES, unit="ms", title="The ladder")


@pytest.mark.parametrize("wrong", [{}, {"ring": {}}, {"ring": -1.0}, {"ring": math.nan}, {"ring": {"a": math.inf}}])
def test_what_cannot_be_drawn_is_refused(wrong):
    with pytest.raises(ValueError, match="pass"):
        draw_bars(wrong, unit="ms", title="none")


def test_it_renders_few_and_many():
    for numbers in (PLAIN, SERIES, {f"parameter {i}": float(i) for i in range(28)}, {"nothing": 0.0}):
        assert to_png(draw_bars(numbers, unit="ms", title="Bars", subtitle="of a test"))[:4] == b"\x89PNG"
