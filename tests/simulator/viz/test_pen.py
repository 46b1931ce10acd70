"""A pen draws what it collected as a few collections, each shape and word where it was put."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from pen_facts import words_of

from simulator.viz import to_png
from simulator.viz.drawing.pen import Pen
from simulator.viz.drawing.style import DPI, LegendBox
from simulator.viz.drawing.words import width_in


def sheet(wide=12.8, tall=4.0):
    figure = Figure(figsize=(wide, tall), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, wide)
    axes.set_ylim(0, tall)
    axes.set_axis_off()
    return figure, Pen(axes)


def pixels(figure):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[::-1, :, :3]  # row 0 is the bottom


def test_shapes_of_a_kind_are_one_collection_and_all_words_one_artist():
    figure, pen = sheet()
    for index in range(50):
        pen.box((0.1 * index, 1.0), 0.08, 0.5, "#0072B2")
        pen.outline((0.1 * index, 2.0), 0.08, 0.5, "#D55E00")
        pen.arrow((0.1 * index, 3.0), (0.1 * index, 3.5), "#009E73")
        pen.words((0.1 * index, 0.5), str(index))
    pen.flush()
    assert {artist.get_gid() for artist in figure.axes[0].collections} == {"boxes", "lines", "arrows", "outlines"}
    assert [len(artist.get_paths()) for artist in figure.axes[0].collections] == [50] * 4
    assert words_of(figure.axes[0]) == [str(index) for index in range(50)]


def test_a_box_fills_its_place_and_no_more():
    figure, pen = sheet()
    pen.box((2.0, 1.0), 3.0, 0.5, "#FF0000", line=0)
    pen.flush()
    red = (pixels(figure) == (255, 0, 0)).all(axis=2)
    rows, columns = np.flatnonzero(red.any(axis=1)), np.flatnonzero(red.any(axis=0))
    assert (rows.min(), rows.max()) == (1.0 * DPI, 1.5 * DPI - 1)
    assert (columns.min(), columns.max()) == (2.0 * DPI, 5.0 * DPI - 1)


@pytest.mark.parametrize(("side", "share"), [("left", 0.0), ("center", 0.5), ("right", 1.0)])
def test_words_stand_where_they_were_put(side, share):
    figure, pen = sheet()
    pen.words((6.0, 2.0), "rank 0", size=20, colour="black", side=side)
    pen.flush()
    columns = np.flatnonzero((pixels(figure) < 128).all(axis=2).any(axis=0))
    start = 6.0 * DPI - share * width_in("rank 0", 20) * DPI
    ink = TextPath((0, 0), "rank 0", prop=FontProperties(size=20)).get_extents()  # letters begin a little after that
    assert columns.min() == pytest.approx(start + ink.x0 / 72 * DPI, abs=2)
    assert columns.max() == pytest.approx(start + ink.x1 / 72 * DPI, abs=2)


def test_an_arrow_ends_at_its_tip_and_bends_to_its_left():
    figure, pen = sheet()
    pen.arrow((2.0, 1.0), (8.0, 1.0), "#FF0000", bend=0.3)
    pen.flush()
    red = (pixels(figure) == (255, 0, 0)).all(axis=2)
    assert np.flatnonzero(red.any(axis=0)).max() == pytest.approx(8.0 * DPI, abs=6)
    assert np.flatnonzero(red.any(axis=1)).max() == pytest.approx((1.0 + 0.3 * 6.0 / 2) * DPI, abs=4)


def test_a_legend_breaks_into_lines_that_stay_on_the_page():
    figure, pen = sheet()
    boxes = [LegendBox("#0072B2", "white", "A", f"entry number {index}, a long one") for index in range(9)]
    pen.legend(boxes)
    pen.flush()
    assert len(boxes) == sum(word.startswith("entry") for word in words_of(figure.axes[0]))
    dark = (pixels(figure) < 128).all(axis=2)
    assert np.flatnonzero(dark.any(axis=0)).max() < 12.65 * DPI
    assert np.flatnonzero(dark.any(axis=1)).max() > 0.4 * DPI  # two lines or more


def test_nothing_drawn_is_nothing():
    figure, pen = sheet()
    pen.words((1.0, 1.0), "")
    pen.flush()
    assert not figure.axes[0].collections
    assert width_in(" ", 10) == 0.0
    assert to_png(figure).startswith(b"\x89PNG")
