"""A bare axes' scale says what matplotlib's own axis says; names stand apart; a legend stays inside the picture."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pen_facts import legend_of, words_of

from simulator.viz.drawing.pen import put_legend
from simulator.viz.drawing.plot import draw_scale, draw_time_scale, even_ticks, frame, spread_apart
from simulator.viz.drawing.style import DPI, LegendBox


def bare(low, high):
    figure = Figure(figsize=(6.0, 4.0), dpi=DPI)
    axes = frame(figure, left=1.0, right=1.0, top=1.0, bottom=1.0, bare=True)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    return figure, axes


def inked(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return (np.asarray(canvas.buffer_rgba())[..., :3] < 250).any(axis=2)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 17.5), (0.0, 0.00042), (120.0, 180.0), (1e6, 4.2e6)])
def test_ticks_are_those_of_matplotlib(low, high):
    ticks = even_ticks(low, high, 9)
    expected = MaxNLocator(9, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    assert list(ticks) == [value for value in expected if low <= value <= high]
    assert [float(text.replace(",", "")) for text in ticks.values()] == pytest.approx(list(ticks))


@pytest.mark.parametrize("which", ["x", "y"])
def test_ticks_and_their_texts_stand_at_their_values_outside_the_axes(which):
    figure, axes = bare(0.0, 10.0)
    draw_scale(axes, which, {2.5: "one", 7.5: "two"}, "label")
    ink = inked(figure)[::-1]  # row 0 is the bottom
    assert not ink[DPI + 2 : 3 * DPI - 2, DPI + 2 : 5 * DPI - 2].any()
    strip = ink[DPI - 4, :] if which == "x" else ink[:, DPI - 4]
    length = 4 * DPI if which == "x" else 2 * DPI
    assert np.flatnonzero(strip).tolist() == pytest.approx([DPI + 0.25 * length, DPI + 0.75 * length], abs=1)
    assert set(words_of(axes)) | {text.get_text() for text in axes.texts} == {"one", "two", "label"}


def test_time_is_written_in_the_unit_that_suits_its_end():
    _, axes = bare(0.0, 0.0042)
    draw_time_scale(axes, "time")
    assert words_of(axes)[-1] == "time (ms)"
    assert "4" in words_of(axes)


def test_names_keep_near_their_ends_and_apart_from_each_other():
    places = spread_apart([0.5, 0.52, 0.99, 0.1], [0.1] * 4)
    assert (places[0], places[3]) == (0.5, 0.1)
    assert min(np.diff(sorted(places))) >= 0.1 - 1e-12
    assert max(places) <= 0.95 + 1e-12
    assert spread_apart([0.9, 0.8], [0.5, 0.5]) == pytest.approx([0.75, 0.25])


def test_a_legend_of_two_lines_is_inside_the_picture():
    figure = Figure(figsize=(12.8, 2), dpi=100)
    boxes = [LegendBox("#0072B2", "white", letter, f"kind {letter}, with many words in it") for letter in "ABCDE"]
    put_legend(figure, boxes)
    assert sorted(legend_of(figure)) == [box.words for box in boxes]
    rows, columns = (np.flatnonzero(inked(figure).any(axis=side)) for side in (1, 0))
    assert len(np.flatnonzero(np.diff(rows) > 1)) == 1, "two lines of boxes and words, with white between them"
    assert columns[0] > 0
    assert columns[-1] < 1279
    assert rows[0] > 0
    assert rows[-1] < 199
