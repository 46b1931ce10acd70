"""A newcomer's way: `distlab lesson start`, open a lesson, run all cells, and move what moves.

`make test` opens lesson 01 as it is given out, the shortest with a panel and a timeline; `make soak` opens every other
lesson, with the solutions in its cells.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser_lab import SETTINGS, end, open_notebook

ROOT = Path(__file__).resolve().parents[2]
LESSON = "01_ranks_and_messages"
OTHERS = sorted(path.parent.name for path in ROOT.glob("lessons/*/solution.ipynb") if path.parent.name != LESSON)
SOLUTION = "solution.ipynb"
# Whatever takes the focus or shows a picture in an output, and has no name that a screen reader could say.
NAMELESS = """() => {
    const named = (id) => document.getElementById(id)?.innerText.trim();
    const nameOf = (one) => [one.getAttribute("aria-label"), one.getAttribute("alt"), one.title, one.placeholder,
        ...(one.getAttribute("aria-labelledby") ?? "").split(" ").map(named), ...[...(one.labels ?? [])].map(
            (label) => label.innerText), one.matches("input, textarea, select, img, canvas") ? "" : one.innerText,
    ].find((text) => text?.trim());
    const kinds = "img, canvas, button, input:not([type=hidden]), select, textarea, [role=slider], [tabindex='0']";
    const shown = [...document.querySelectorAll(".jp-Notebook .jp-OutputArea-output")].flatMap(
        (output) => [...output.querySelectorAll(kinds)]);
    return [...new Set(shown)].filter((one) => one.checkVisibility() && !one.closest("[aria-hidden=true]"))
        .filter((one) => !nameOf(one)).map((one) => one.outerHTML.slice(0, 160));
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Lessons served from a work folder of their own: (address, token)."""
    work = tmp_path_factory.mktemp("work")
    for name, values in SETTINGS.items():
        path = work / ".jupyter" / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    command = [sys.executable, "-m", "distlab", "lesson", "start", "--work", str(work), "--no-browser"]
    log = work / "start.log"
    with log.open("wb") as out:
        started = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ))
    try:
        deadline = time.monotonic() + 90
        while not (found := re.search(r"(http://127\.0\.0\.1:\d+)/lab\S*token=(\w+)", log.read_text())):
            assert started.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        for folder in OTHERS:
            shutil.copy(ROOT / "lessons" / folder / SOLUTION, work / folder / SOLUTION)
        yield found.groups()
    finally:
        end(started)


@pytest.fixture(scope="module")
def lesson(server, tmp_path_factory):
    base, token = server
    address = f"{base}/lab/tree/{LESSON}/{LESSON}.ipynb?token={token}"
    with open_notebook(address, base, tmp_path_factory.mktemp("browser")) as opened:
        opened.wait_for_kernel()
        yield opened


@pytest.mark.timeout(300)
def test_every_cell_of_lesson_01_runs_and_its_pictures_move(lesson, shots):
    lesson.run_all(timeout_s=220)
    assert lesson.trouble() == []
    page = lesson.page
    panels, timelines = page.locator(".distlab-picture"), page.locator(".distlab-timeline canvas")
    panels.first.wait_for()
    assert panels.count() >= 1
    assert timelines.count() >= 1
    assert page.locator(".distlab-picture figcaption.failed").count() == 0
    assert page.evaluate(NAMELESS) == []
    for place in range(timelines.count()):
        timelines.nth(place).scroll_into_view_if_needed()
        page.wait_for_timeout(300)
        lesson.shoot(shots / f"lesson-01-timeline-{place}.png")
    move_panel(page, panels_of(page).first)
    lesson.shoot(shots / "lesson-01-panel.png")
    output = page.locator(".jp-OutputArea-output pre").first
    assert output.evaluate("(text) => getComputedStyle(text).wordBreak") == "normal"  # lines end between words
    move_timeline(page, timelines.first)
    assert lesson.console == []
    assert lesson.offsite == []


@pytest.mark.soak  # 14 whole lessons, half a minute each on a machine that does nothing else
@pytest.mark.timeout(600)
@pytest.mark.parametrize("folder", OTHERS, ids=lambda folder: folder[:2])
def test_every_cell_of_a_solution_runs_and_its_pictures_move(server, folder, tmp_path, shots):
    base, token = server
    address = f"{base}/lab/tree/{folder}/{SOLUTION}?token={token}&reset"
    with open_notebook(address, base, tmp_path) as lesson:
        lesson.wait_for_kernel()
        lesson.run_all(timeout_s=500)
        assert lesson.trouble() == []
        page = lesson.page
        assert page.locator(".distlab-picture figcaption.failed").count() == 0
        assert page.evaluate(NAMELESS) == []
        panels = panels_of(page)
        for place in range(panels.count()):
            move_panel(page, panels.nth(place))
            lesson.shoot(shots / f"lesson-{folder[:2]}-panel-{place}.png")
        timelines = page.locator(".distlab-timeline canvas")
        for place in range(timelines.count()):
            move_timeline(page, timelines.nth(place))
        assert page.locator(".distlab-picture figcaption.failed").count() == 0
        assert lesson.console == []
        assert lesson.offsite == []


def panels_of(page):
    """The panels that have a slider."""
    boxes = page.locator(".widget-vbox", has=page.locator(".distlab-picture"))
    return boxes.filter(has=page.locator(".noUi-handle"))


def move_panel(page, box):
    """Move a panel's first slider, by key and by mouse; each shows another picture, or its words change."""
    slider, image = box.locator(".noUi-handle").first, box.locator(".distlab-picture img")
    slider.scroll_into_view_if_needed()
    track = box.locator(".noUi-target").first
    at_end = slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemax")
    for act in (lambda: press(page, slider, "ArrowLeft" if at_end else "ArrowRight"), lambda: click(page, track)):
        before = image.get_attribute("src"), box.inner_text()
        act()
        changed = "([box, image, [source, text]]) => image.src !== source || box.innerText !== text"
        page.wait_for_function(changed, arg=[box.element_handle(), image.element_handle(), before], timeout=60_000)
        page.wait_for_timeout(1000)


def press(page, slider, key):
    slider.focus()
    page.keyboard.press(key)


def click(page, track):
    """Click where the handle is not: near the end of a track that is further away."""
    handle, bar = track.locator(".noUi-handle").bounding_box(), track.bounding_box()
    right = handle["x"] + handle["width"] / 2 < bar["x"] + bar["width"] / 2
    page.mouse.click(bar["x"] + (0.9 if right else 0.1) * bar["width"], bar["y"] + bar["height"] / 2)


def move_timeline(page, canvas):
    """Zoom by key, then drag by mouse; each shows another view and other pixels."""
    canvas.scroll_into_view_if_needed()
    for act in (zoom_in, drag):
        before = canvas.evaluate("(canvas) => [canvas.dataset.view, canvas.toDataURL()]")
        act(page, canvas)
        other = "([canvas, [view, pixels]]) => canvas.dataset.view !== view && canvas.toDataURL() !== pixels"
        page.wait_for_function(other, arg=[canvas.element_handle(), before], timeout=60_000)


def zoom_in(page, canvas):
    canvas.focus()
    page.keyboard.press("+")
    page.keyboard.press("+")
    page.wait_for_timeout(300)


def drag(page, canvas):
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 - 120, box["y"] + 60, steps=4)
    page.mouse.up()
