"""In every picture of the lessons no text lies on another, is cut, small or pale: light and dark, at three widths."""

import re
from functools import cache

import numpy as np
import pytest

pytest.importorskip("anywidget", reason="panels need the notebooks extra")

from lesson_inputs import INPUTS  # noqa: E402
from lesson_pictures import FOLDERS, Lesson  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from picture_facts import clashes, look_at, pale_texts, small_texts  # noqa: E402

from distlab.notebook.display import DPI, Picture, png_of  # noqa: E402
from distlab.plan import Mesh, Plan, one_f_one_b  # noqa: E402
from simulator import cluster, memory_of, model_by_name, simulate  # noqa: E402
from simulator.viz import to_png  # noqa: E402
from simulator.viz.drawing.paint import flip  # noqa: E402
from simulator.viz.drawing.style import LEAST_PT, LINE_COLOURS, RANK_COLOURS, contrast  # noqa: E402
from simulator.viz.panels import planner  # noqa: E402
from simulator.viz.show_objects import PICTURES  # noqa: E402

PAGES_PX = {"5 inches": 480, "a usual notebook": 1000, "12 inches": 1152}
LEAST_SHOWN_PT = 6.8  # 9 pixels


def dark_png(figure):
    return png_of(figure, dark=True)


@pytest.fixture
def one_map(monkeypatch):
    """Let the panel of lesson 15 search plans for one wire and one batch, and draw that map for the others too."""
    found = cache(lambda models, counts: real(models, machine, counts, batch_size=256))
    real, machine = planner.strategy_map, cluster("dgx-h100", 8)
    monkeypatch.setattr(planner, "strategy_map", lambda models, cluster, counts, batch_size: found(models, counts))


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name[:2] for folder in FOLDERS])
def test_the_pictures_of_a_lesson_can_be_read(folder, one_map):
    require_readable(folder)


@pytest.mark.soak
@pytest.mark.timeout(400)  # plans for 48 cells
def test_every_map_of_strategies_can_be_read():
    require_readable(next(folder for folder in FOLDERS if folder.name.startswith("15")))


def require_readable(folder):
    shown = Lesson(folder, INPUTS[folder.name[:2]]()).run()
    assert shown
    found = {}
    for one in shown:
        look = look_at(one.figure, png_of if one.how == "show" else to_png)
        assert look.written
        found[one.name] = [*clashes(look), *pale_texts(look), *small_texts(look, LEAST_PT)]
        if one.how == "show":
            dark = look_at(one.figure, dark_png, flip)
            found[f"{one.name} in dark"] = [*clashes(dark), *pale_texts(dark)]
    assert not {name: faults for name, faults in found.items() if faults}


def objects():
    workload = model_by_name("gpt-2-1.5b")
    step = simulate(workload, cluster("dgx-h100", 8), Plan(data=8))
    schedule, plan = one_f_one_b(4, 8), Plan(data=2, pipeline=4, num_microbatches=8)
    return [Mesh([("data", 2), ("tensor", 4)]), schedule, plan, step.trace, memory_of(workload, Plan(data=2)), step]


@pytest.mark.parametrize("item", objects(), ids=lambda item: type(item).__name__)
def test_the_pictures_of_objects_can_be_read(item):
    for figure, _ in PICTURES[type(item)](item):
        for look in (look_at(figure, to_png), look_at(figure, dark_png, flip)):
            assert not [*clashes(look), *pale_texts(look), *small_texts(look, LEAST_PT)]


@pytest.mark.parametrize("page_px", PAGES_PX.values(), ids=PAGES_PX)
def test_letters_are_large_enough_on_a_page_of_any_width(page_px):
    figure = Figure(figsize=(12.8, 3))
    figure.text(0.1, 0.5, "letters", fontsize=LEAST_PT)
    html = Picture(png_of(figure), "letters")._repr_mimebundle_()["text/html"]
    least, most = (int(re.search(rf"{which}-width:(\d+)px", html)[1]) for which in ("min", "max"))
    assert most == round(12.8 * DPI)
    assert least <= 800, "it fits the column of a notebook in a window of 1280 pixels, next to the file browser"
    assert "overflow-x:auto" in html
    assert "::-webkit-scrollbar" in html, "the bar is seen where systems hide bars"
    shown_px = min(max(page_px, least), most)
    assert 72 / 96 * (LEAST_PT * DPI / 72) * shown_px / most >= LEAST_SHOWN_PT - 0.01


def test_a_picture_follows_a_dark_page_and_is_light_where_styles_are_dropped():
    figure = Figure(figsize=(4, 3))
    figure.text(0.1, 0.5, "letters")
    light, dark = png_of(figure), dark_png(figure)
    html = Picture(light, "letters", dark)._repr_mimebundle_()["text/html"]
    style, rest = re.fullmatch(r"<style>(.*)</style>(.*)", html, re.DOTALL).groups()
    name = re.search(r'class="(distlab-[0-9a-f]{12})"', rest)[1]
    for page in ('body[data-jp-theme-light="false"]', "body.vscode-dark"):
        assert f"{page} .{name}" in style
    assert rest.count("data:image/png") == style.count("data:image/png") == 1
    paper = [look_at(figure, render).pixels[0, 0] for render in (png_of, dark_png)]
    np.testing.assert_allclose(paper, [np.ones(3), np.zeros(3)])
    assert "body" not in Picture(light, "letters")._repr_mimebundle_()["text/html"]


def test_dark_colours_keep_their_hue_and_can_be_seen():
    greys = np.array([[0.0] * 3, [0.25] * 3, [1.0] * 3])
    np.testing.assert_allclose(flip(greys), 1 - greys)
    yellow = flip(np.array([0.94, 0.89, 0.26]))
    assert yellow[0] > yellow[1] > yellow[2]
    assert contrast(yellow, (0, 0, 0)) > 3
    colours = [*LINE_COLOURS, *RANK_COLOURS]
    assert not {colour for colour in colours if contrast(flip(np.array(to_rgb(colour))), np.zeros(3)) < 3.0}


@pytest.mark.parametrize("where", [(0.4, 0.5), (0.42, 0.5), (-0.1, 0.5), (0.9, 0.5)])
def test_the_measure_finds_texts_that_touch_or_are_cut(where):
    figure = Figure(figsize=(4, 3))
    figure.text(0.4, 0.5, "one text")
    figure.text(*where, "another text")
    look = look_at(figure)
    assert clashes(look)
    assert not clashes(look_at(figure, png_of)) or where[0] in (0.4, 0.42), "show() keeps what stands outside"


def test_the_measure_finds_pale_and_small_texts():
    figure = Figure(figsize=(4, 3))
    figure.text(0.1, 0.2, "pale", fontsize=12, color="#999999")
    figure.text(0.1, 0.5, "small", fontsize=7)
    figure.text(0.1, 0.8, "as it should be", fontsize=12)
    look = look_at(figure)
    assert [text.split()[0] for text in pale_texts(look)] == ["'pale'"]
    assert [text.split()[0] for text in small_texts(look, LEAST_PT)] == ["'small'"]
    assert not clashes(look)
