"""Pens, bare axes, legends and stamped letters stand where they were meant to; what a notebook gets of a picture."""

import base64
import io
import re

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator
from picture_facts import clashes, look_at, pale_texts, plain, small_texts, words
from PIL import Image
from viz_traces import data_parallel, grid

from simulator.viz import Picture, draw_timeline, to_png
from simulator.viz.drawing.paint import pack_png
from simulator.viz.drawing.pen import Pen, put_legend, sheet
from simulator.viz.drawing.picture import LEAST_SHOWN_PT, SHOWN_DPI
from simulator.viz.drawing.plot import draw_scale, even_ticks, frame, spread_apart, width_in
from simulator.viz.drawing.theme import DPI, LEAST_PT, LegendBox

PAGES_PX = {"5 inches": 480, "a usual notebook": 1000, "12 inches": 1152}


def pixels(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[::-1, :, :3]  # row 0 is the bottom


def drawn(*calls):
    """Return the figure of a pen's calls, each (name, arguments, options)."""
    figure, pen = sheet(4.0)
    for name, given, options in calls:
        getattr(pen, name)(*given, **options)
    pen.flush()
    return figure


def where(mask):
    """Return the first and the last row and column of a mask."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return rows.min(), rows.max(), columns.min(), columns.max()


def test_a_box_fills_its_place_and_no_more():
    figure = drawn(("box", ((2.0, 1.0), 3.0, 0.5, "#FF0000"), {"line": 0}))
    assert where((pixels(figure) == (255, 0, 0)).all(axis=2)) == (DPI, 1.5 * DPI - 1, 2 * DPI, 5 * DPI - 1)


@pytest.mark.parametrize(("side", "share"), [("left", 0.0), ("center", 0.5), ("right", 1.0)])
def test_words_stand_where_they_were_put(side, share):
    figure = drawn(("words", ((6.0, 2.0), "rank 0"), {"size": 20, "colour": "black", "side": side}))
    _, _, first, last = where((pixels(figure) < 128).all(axis=2))
    start = 6.0 * DPI - share * width_in("rank 0", 20) * DPI
    ink = TextPath((0, 0), "rank 0", prop=FontProperties(size=20)).get_extents()  # letters begin a little after that
    assert (first, last) == pytest.approx((start + ink.x0 / 72 * DPI, start + ink.x1 / 72 * DPI), abs=2)


def test_an_arrow_ends_at_its_tip_and_bends_to_its_left():
    figure = drawn(("arrow", ((2.0, 1.0), (8.0, 1.0), "#FF0000"), {"bend": 0.3}))
    _, top, _, tip = where((pixels(figure) == (255, 0, 0)).all(axis=2))
    assert tip == pytest.approx(8.0 * DPI, abs=6)
    assert top == pytest.approx((1.0 + 0.3 * 6.0 / 2) * DPI, abs=4)


def test_nothing_drawn_is_nothing():
    figure = drawn(("words", ((1.0, 1.0), ""), {}))
    assert not figure.axes[0].collections
    assert width_in(" ", 10) == 0.0


def test_a_legend_breaks_into_lines_inside_the_picture():
    figure = Figure(figsize=(12.8, 2), dpi=DPI)
    boxes = [LegendBox("#0072B2", "white", letter, f"kind {letter}, with many words in it") for letter in "ABCDE"]
    put_legend(figure, boxes)
    assert {box.words for box in boxes} <= set(words(figure))
    low, high, left, right = where((pixels(figure) < 250).any(axis=2))
    assert 0 < low < high < 2 * DPI - 1
    assert 0 < left < right < 12.8 * DPI - 1
    assert high > 0.4 * DPI, "two lines"


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 17.5), (0.0, 0.00042), (120.0, 180.0), (1e6, 4.2e6)])
def test_ticks_are_those_of_matplotlib(low, high):
    ticks = even_ticks(low, high, 9)
    expected = MaxNLocator(9, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    assert list(ticks) == [value for value in expected if low <= value <= high]
    assert [float(text.replace(",", "")) for text in ticks.values()] == pytest.approx(list(ticks))


@pytest.mark.parametrize("which", ["x", "y"])
def test_ticks_and_their_texts_stand_at_their_values_outside_the_axes(which):
    figure = Figure(figsize=(6.0, 4.0), dpi=DPI)
    axes = frame(figure, left=1.0, right=1.0, top=1.0, bottom=1.0, bare=True)
    axes.set(xlim=(0.0, 10.0), ylim=(0.0, 10.0))
    draw_scale(axes, which, {2.5: "one", 7.5: "two"}, "label")
    ink = (pixels(figure) < 250).any(axis=2)
    assert not ink[DPI + 2 : 3 * DPI - 2, DPI + 2 : 5 * DPI - 2].any()
    strip = ink[DPI - 4, :] if which == "x" else ink[:, DPI - 4]
    length = 4 * DPI if which == "x" else 2 * DPI
    assert np.flatnonzero(strip).tolist() == pytest.approx([DPI + 0.25 * length, DPI + 0.75 * length], abs=1)
    assert set(words(figure)) == {"one", "two", "label"}


def test_names_keep_near_their_ends_and_apart_from_each_other():
    places = spread_apart([0.5, 0.52, 0.99, 0.1], [0.1] * 4)
    assert (places[0], places[3]) == (0.5, 0.1)
    assert min(np.diff(sorted(places))) >= 0.1 - 1e-12
    assert max(places) <= 0.95 + 1e-12
    assert spread_apart([0.9, 0.8], [0.5, 0.5]) == pytest.approx([0.75, 0.25])


def colours(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def texts(*places, size=20.0, colour="black", angle=0.0, text="Rank 0 agqp"):
    figure = Figure(figsize=(4, 2), dpi=100, facecolor="#999999")
    for x, y in places:
        figure.text(x, y, text, fontsize=size, color=colour, rotation=angle)
    return figure


@pytest.mark.parametrize(
    "look",
    [{}, {"colour": "white"}, {"size": 12}, {"colour": "#0072B2"}, {"angle": 90.0}, {"text": "$\\alpha + n / \\beta$"}],
)
def test_text_on_whole_pixels_is_stamped_as_it_is_drawn_and_nothing_is_mixed_up(look):
    figure = texts((0.1, 0.25), (0.3, 0.5), (0.5, 0.75), **look)
    assert np.abs(colours(to_png(figure)) - colours(plain(figure))).max() <= 2
    assert to_png(figure) == to_png(figure)


def test_text_is_clipped_where_the_axes_end():
    figure = Figure(figsize=(4, 2), dpi=100)
    figure.add_axes((0.25, 0.25, 0.5, 0.5)).text(0.9, 0.5, "far beyond the axes", fontsize=20, clip_on=True)
    painted = colours(to_png(figure))
    assert (painted[60:140, 310:] == 255).all()
    assert (painted[60:140, 280:298] < 255).any()


def test_a_whole_timeline_differs_from_its_figure_at_the_edges_of_letters_only():
    for trace in (grid(4, 6), data_parallel(3, jitter=0.1)):
        figure = draw_timeline(trace).figure
        differs = np.abs(colours(plain(figure)) - colours(to_png(figure))).max(axis=2)
        assert (differs > 0).mean() < 0.05
        assert differs.mean() < 1.0


def test_opaque_pixels_are_packed_and_nothing_is_lost():
    generator = np.random.default_rng(0)
    for repeats in ([1], [9], [1, 4, 1, 1, 3], [3, 1, 1, 5]):  # rows that come again, at the top and at the bottom
        image = generator.integers(0, 256, (len(repeats), 30, 4)).astype(np.uint8).repeat(repeats, axis=0)
        assert (colours(pack_png(image)) == image[..., :3]).all()
    flat = np.full((400, 1000, 4), 255, np.uint8)
    assert len(pack_png(flat)) < flat.size / 100


def test_a_notebook_gets_one_picture_its_title_as_alt_text_and_the_words():
    picture = draw_timeline(data_parallel(2), title='Two "ranks"')
    data, metadata = picture._repr_mimebundle_()
    assert metadata["image/png"]["alt"] == picture.title == 'Two "ranks"'
    assert data["text/plain"] == repr(picture) == picture.words
    assert 'alt="Two &quot;ranks&quot;"' in data["text/html"]
    assert re.findall(r"base64,([^\"]+)", data["text/html"]) == [data["image/png"]]
    assert ">Two &quot;ranks&quot;. Timeline of 2 ranks" in data["text/html"]
    shown = colours(base64.b64decode(data["image/png"]))
    assert (shown[0, 0] == 255).all(), "a white card, on a dark page too"
    assert (shown == colours(plain(picture.figure, dpi=SHOWN_DPI))).all()


@pytest.mark.parametrize("page_px", PAGES_PX.values(), ids=PAGES_PX)
def test_letters_are_large_enough_on_a_page_of_any_width(page_px):
    html = Picture(Figure(figsize=(12.8, 3)), "letters")._repr_mimebundle_()[0]["text/html"]
    least, most = (int(re.search(rf"{which}-width:(\d+)px", html)[1]) for which in ("min", "max"))
    assert most == round(12.8 * SHOWN_DPI)
    assert least <= 800, "it fits the column of a notebook in a window of 1280 pixels, next to the file browser"
    assert "overflow-x:auto" in html
    assert "::-webkit-scrollbar" in html, "the bar is seen where systems hide bars"
    shown_px = min(max(page_px, least), most)
    assert 72 / 96 * (LEAST_PT * SHOWN_DPI / 72) * shown_px / most >= LEAST_SHOWN_PT - 0.01


@pytest.mark.parametrize("place", [(0.4, 0.5), (0.42, 0.5), (-0.1, 0.5), (0.9, 0.5)])
def test_the_measure_finds_texts_that_touch_or_are_cut(place):
    figure = Figure(figsize=(4, 3))
    figure.text(0.4, 0.5, "one text")
    figure.text(*place, "a different text")
    assert clashes(look_at(figure))
    shown = clashes(look_at(figure, lambda figure: Picture(figure, "two texts").png()))
    assert not shown or place[0] in (0.4, 0.42), "a notebook's picture keeps what stands outside"


def test_the_measure_finds_pale_and_small_texts():
    figure = Figure(figsize=(4, 3))
    figure.text(0.1, 0.2, "pale", fontsize=12, color="#999999")
    figure.text(0.1, 0.5, "small", fontsize=7)
    figure.text(0.1, 0.8, "as it should be", fontsize=12)
    look = look_at(figure)
    assert [text.split()[0] for text in pale_texts(look)] == ["'pale'"]
    assert [text.split()[0] for text in small_texts(look)] == ["'small'"]
    assert not clashes(look)


def test_shapes_of_a_kind_are_one_artist():
    pen = Pen(sheet(4.0)[0].axes[0])
    for index in range(50):
        pen.box((0.1 * index, 1.0), 0.08, 0.5, "#0072B2")
        pen.words((0.1 * index, 0.5), str(index))
    before = len(pen.surface.get_children())
    pen.flush()
    assert len(pen.surface.get_children()) == before + 2
