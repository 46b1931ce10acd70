"""Light axes say what matplotlib's own axes say, where they say it; a legend's words stand inside the picture."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from simulator.viz.drawing.legend import legend_of, put_legend
from simulator.viz.drawing.light_axes import LightAxes
from simulator.viz.drawing.style import LegendBox

BOX = (0.2, 0.3, 0.6, 0.5)


def axes_with(make, low, high):
    figure = Figure(figsize=(6, 4), dpi=100)
    FigureCanvasAgg(figure)
    axes = make(figure, BOX)
    figure.add_axes(axes)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    figure.canvas.draw()
    return axes


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 17.5), (0.0, 0.00042), (120.0, 0.0), (1e6, 4.2e6)])
def test_ticks_are_those_of_matplotlib(low, high):
    light, plain = axes_with(LightAxes, low, high), axes_with(plt.Axes, low, high)
    for name, column in (("xaxis", 0), ("yaxis", 1)):
        ours, theirs = getattr(light, name), getattr(plain, name)
        points = np.zeros((len(theirs.get_majorticklocs()), 2))
        points[:, column] = theirs.get_majorticklocs()
        wanted = {
            (round(float(place), 3), label.get_text())
            for value, place, label in zip(
                theirs.get_majorticklocs(),
                plain.transData.transform(points)[:, column],
                theirs.get_ticklabels(),
                strict=True,
            )
            if min(low, high) <= value <= max(low, high)
        }
        places, texts = ours.shown()
        assert {(round(place, 3), text) for place, text in zip(places.tolist(), texts, strict=True)} == wanted


def test_no_grid_can_be_asked_for():
    axes = axes_with(LightAxes, 0.0, 1.0)
    axes.grid(False)
    with pytest.raises(ValueError, match="pass light=False"):
        axes.grid(True)


def test_a_legend_of_two_lines_is_inside_the_picture():
    figure = Figure(figsize=(6, 2), dpi=100)
    canvas = FigureCanvasAgg(figure)
    boxes = [LegendBox("#0072B2", "white", letter, f"kind {letter}") for letter in "ABCDE"]
    put_legend(figure, boxes, max_columns=3)
    assert legend_of(figure) == [f"kind {letter}" for letter in "ABCDE"]
    canvas.draw()
    inked = (np.asarray(canvas.buffer_rgba())[..., :3] < 250).any(axis=2)
    rows, columns = np.flatnonzero(inked.any(axis=1)), np.flatnonzero(inked.any(axis=0))
    gaps = np.flatnonzero(np.diff(rows) > 1)
    assert len(gaps) == 1, "two lines of boxes and words, with white between them"
    assert columns[0] > 0
    assert columns[-1] < 599
    assert rows[0] > 0
    assert rows[-1] < 199
