"""Words and stamped letters stand where they were meant to; what a notebook gets of a picture."""

import base64
import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from picture_facts import clashes, colours, look_at, pale_texts, plain, small_texts
from viz_traces import data_parallel, grid

from distlab.plan import one_f_one_b
from simulator.viz import draw_timeline, to_png
from simulator.viz.drawing.paint import pack_png
from simulator.viz.drawing.pen import SHOWN_DPI, sheet
from simulator.viz.drawing.plot import width_in
from simulator.viz.drawing.theme import DPI


def test_words_stand_where_they_were_put():
    for side, share in (("left", 0.0), ("center", 0.5), ("right", 1.0)):
        figure, pen = sheet(4.0)
        pen.words((6.0, 2.0), "rank 0", size=20, colour="#FF0000", side=side)
        pen.flush()
        columns = np.flatnonzero((colours(plain(figure)) == (255, 0, 0)).all(axis=2).any(axis=0))
        wide = width_in("rank 0", 20) * DPI
        start = 6.0 * DPI - share * wide
        assert (columns.min(), columns.max()) == pytest.approx((start, start + wide), abs=4)


def texts(size=20.0, colour="black", angle=0.0, text="Rank 0 agqp"):
    figure = Figure(figsize=(4, 2), dpi=100, facecolor="#999999")
    for x, y in ((0.1, 0.25), (0.3, 0.5), (0.5, 0.75)):
        figure.text(x, y, text, fontsize=size, color=colour, rotation=angle)
    return figure


def test_text_is_stamped_as_it_is_drawn_and_clipped_where_axes_end():
    for look in ({}, {"colour": "white"}, {"size": 12}, {"angle": 90.0}, {"text": "$\\alpha + n / \\beta$"}):
        figure = texts(**look)
        assert np.abs(colours(to_png(figure)) - colours(plain(figure))).max() <= 2
        assert to_png(figure) == to_png(figure)
    figure = Figure(figsize=(4, 2), dpi=100)
    figure.add_axes((0.25, 0.25, 0.5, 0.5)).text(0.9, 0.5, "far beyond the axes", fontsize=20, clip_on=True)
    painted = colours(to_png(figure))
    assert (painted[60:140, 310:] == 255).all()
    assert (painted[60:140, 280:298] < 255).any()
    figure = draw_timeline(grid(4, 6)).figure
    differs = np.abs(colours(plain(figure)) - colours(to_png(figure))).max(axis=2)
    assert ((differs > 0).mean() < 0.05) & (differs.mean() < 1.0), "at the edges of letters only"


def test_opaque_pixels_are_packed_and_nothing_is_lost():
    for repeats in ([1], [9], [1, 4, 1, 1, 3]):  # rows that come again
        rows = np.random.default_rng(0).integers(0, 256, (len(repeats), 30, 4)).astype(np.uint8)
        image = rows.repeat(repeats, axis=0)
        assert (colours(pack_png(image)) == image[..., :3]).all()
    flat = np.full((400, 1000, 4), 255, np.uint8)
    assert len(pack_png(flat)) < flat.size / 100


def test_a_notebook_gets_one_picture_its_title_as_alt_text_and_the_words():
    picture = draw_timeline(data_parallel(2), title='Two "ranks"')
    data, metadata = picture._repr_mimebundle_()
    page = data["text/html"]
    assert metadata["image/png"]["alt"] == picture.title == 'Two "ranks"'
    assert data["text/plain"] == repr(picture) == picture.words
    assert 'alt="Two &quot;ranks&quot;"' in page
    assert ">Two &quot;ranks&quot;. Timeline of 2 ranks" in page
    assert re.findall(r"base64,([^\"]+)", page) == [data["image/png"]]
    shown = colours(base64.b64decode(data["image/png"]))
    assert (shown[0, 0] == 255).all(), "a white card, on a dark page too"
    assert (shown == colours(plain(picture.figure, dpi=SHOWN_DPI))).all()
    assert f"width:100%;max-width:{round(12.8 * SHOWN_DPI)}px" in page, "it shrinks with its page, and is never cut"
    data, metadata = one_f_one_b(4, 8)._repr_mimebundle_()
    assert "leaves 27.3 % of 4 ranks' time idle" in metadata["image/png"]["alt"], "a Schedule shows itself too"
    assert "(1 ms per F, I and W) on 4 ranks" in data["text/plain"]


def test_the_measure_finds_texts_that_touch_are_cut_pale_or_small():
    figure = Figure(figsize=(4, 3))
    for x in (0.4, 0.42, 0.9):
        figure.text(x, 0.5, "one text")
    assert [text.split()[-1] for text in clashes(look_at(figure))] == ["text'", "cut"]
    figure = Figure(figsize=(4, 3))
    for y, text, look in ((0.2, "pale", {"color": "#999999"}), (0.5, "small", {"fontsize": 7}), (0.8, "right", {})):
        figure.text(0.1, y, text, **({"fontsize": 12} | look))
    look = look_at(figure)
    assert [text.split()[0] for text in (*pale_texts(look), *small_texts(look))] == ["'pale'", "'small'"]
