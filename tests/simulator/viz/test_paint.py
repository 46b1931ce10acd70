"""A Painter's picture is the figure's own: stamped text looks like drawn text, wherever and however often it comes."""

import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from viz_traces import data_parallel, grid

from simulator.viz import draw_timeline, to_png
from simulator.viz.drawing.paint import MAX_STAMPS, Painter, pack_png


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
