"""Pens, bare axes, legends and a Painter's stamped letters put every shape and word where it was meant to be."""

import io

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator
from pen_facts import legend_of, words_of
from PIL import Image
from viz_traces import data_parallel, grid

from simulator.viz import draw_timeline, to_png
from simulator.viz.drawing.paint import MAX_STAMPS, Painter, pack_png
from simulator.viz.drawing.pen import Pen, put_legend
from simulator.viz.drawing.plot import draw_scale, draw_time_scale, even_ticks, frame, spread_apart
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


def bare(low, high):
    figure = Figure(figsize=(6.0, 4.0), dpi=DPI)
    axes = frame(figure, left=1.0, right=1.0, top=1.0, bottom=1.0, bare=True)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    return figure, axes


def inked(figure):
    return (pixels(figure)[::-1] < 250).any(axis=2)


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


def colours(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def words(*places, size=20.0, colour="black", angle=0.0, text="Rank 0 agqp", width=400):
    figure = Figure(figsize=(width / 100, 2), dpi=100)
    for x, y in places:
        figure.text(x, y, text, fontsize=size, color=colour, rotation=angle)
    return figure


def shift_between(first, second):
    """Return the shift, within 1 pixel either way, that makes two pictures most alike, and what then differs."""
    found = {}
    for down in (-1, 0, 1):
        for across in (-1, 0, 1):
            moved = np.roll(second, (down, across), axis=(0, 1))
            found[down, across] = float(np.abs(first - moved)[2:-2, 2:-2].mean())
    best = min(found, key=found.get)
    return best, found[best]


@pytest.mark.parametrize("colour", ["black", "white", "#0072B2"])
def test_level_text_on_whole_pixels_is_the_same_to_the_last_bit(colour):
    places = [(0.1, 0.25), (0.3, 0.5), (0.5, 0.75)]
    figure = words(*places, colour=colour)
    figure.set_facecolor("#999999")
    expected = colours(to_png(figure))
    assert np.abs(colours(Painter().png(figure)) - expected).max() <= 2


def test_text_between_pixels_is_moved_by_less_than_one():
    for place in ((0.1013, 0.2531), (0.3337, 0.5049), (0.12345, 0.77777)):
        plain, painted = colours(to_png(words(place))), colours(Painter().png(words(place)))
        _, differs = shift_between(plain, painted)
        assert differs < 0.25 * np.abs(plain - 255).mean()


def test_a_stamp_that_comes_again_elsewhere_is_the_same_stamp():
    painter = Painter()
    painter.png(words((0.1, 0.2)))
    stamps = len(painter.renderer_for(400, 200, 100).stamps)
    again = painter.png(words((0.3, 0.6)))
    assert len(painter.renderer_for(400, 200, 100).stamps) == stamps == 1
    assert again == Painter().png(words((0.3, 0.6)))


def test_size_colour_and_weight_are_not_mixed_up():
    painter = Painter()
    for figure in (words((0.1, 0.2)), words((0.1, 0.2), size=12), words((0.1, 0.2), colour="red"), words((0.1, 0.2))):
        assert painter.png(figure) == Painter().png(figure)
    wide = words((0.1, 0.2), width=700)
    assert painter.png(wide) == Painter().png(wide)
    assert painter.png(words((0.1, 0.2))) == Painter().png(words((0.1, 0.2)))


def test_turned_text_and_mathematics_are_drawn_as_ever():
    for figure in (words((0.4, 0.2), angle=90.0), words((0.1, 0.2), text="$\\alpha + n / \\beta$")):
        assert (colours(Painter().png(figure)) == colours(to_png(figure))).all()


def test_text_is_clipped_where_the_axes_end():
    figure = Figure(figsize=(4, 2), dpi=100)
    axes = figure.add_axes((0.25, 0.25, 0.5, 0.5))
    axes.text(0.9, 0.5, "far beyond the axes", fontsize=20, clip_on=True)
    painted = colours(Painter().png(figure))
    assert (painted[60:140, 310:] == 255).all()
    assert (painted[60:140, 280:298] < 255).any()


def test_a_whole_timeline_differs_from_its_figure_at_the_edges_of_letters_only():
    painter = Painter()
    for trace in (grid(4, 6), data_parallel(3, jitter=0.1), grid(4, 6)):
        plain, painted = colours(to_png(draw_timeline(trace))), colours(painter.png(draw_timeline(trace)))
        assert plain.shape == painted.shape
        differs = np.abs(plain - painted).max(axis=2)
        assert (differs > 0).mean() < 0.05
        assert differs.mean() < 1.0


def test_opaque_pixels_are_packed_and_nothing_is_lost():
    generator = np.random.default_rng(0)
    for shape in ((1, 1, 4), (7, 5, 4), (64, 200, 4)):
        pixels = generator.integers(0, 256, shape).astype(np.uint8)
        png = pack_png(pixels)
        assert (np.asarray(Image.open(io.BytesIO(png))) == pixels[..., :3]).all()
    for repeats in ([9], [1, 4, 1, 1, 3], [3, 1, 1, 5]):  # rows that come again, at the top, within and at the bottom
        pixels = generator.integers(0, 256, (len(repeats), 30, 4)).astype(np.uint8).repeat(repeats, axis=0)
        pixels[0] = 0
        assert (np.asarray(Image.open(io.BytesIO(pack_png(pixels)))) == pixels[..., :3]).all()
    flat = np.full((400, 1000, 4), 255, np.uint8)
    assert len(pack_png(flat)) < flat.size / 100


def test_memory_is_bounded():
    painter = Painter()
    renderer = painter.renderer_for(400, 200, 100)
    renderer.stamps = dict.fromkeys(range(MAX_STAMPS))
    renderer.sizes = dict.fromkeys(range(MAX_STAMPS))
    painter.png(words((0.1, 0.2)))
    assert len(renderer.stamps) == 1
    assert len(renderer.sizes) <= 3
