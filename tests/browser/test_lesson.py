"""A newcomer's way: `distlab lesson start`, open lesson 03, run all cells, and move what moves."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser_lab import SETTINGS, end, open_notebook

ROOT = Path(__file__).resolve().parents[2]
LESSON = "03_data_parallel"


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
def test_every_cell_of_lesson_03_runs_and_its_pictures_move(lesson, shots):
    lesson.run_all(timeout_s=220)
    assert lesson.trouble() == []
    page = lesson.page
    panels, timelines = page.locator(".distlab-picture"), page.locator(".distlab-timeline canvas")
    panels.first.wait_for()
    assert panels.count() >= 1
    assert timelines.count() >= 1
    assert page.locator(".distlab-picture figcaption.failed").count() == 0
    for place in range(timelines.count()):
        timelines.nth(place).scroll_into_view_if_needed()
        page.wait_for_timeout(300)
        lesson.shoot(shots / f"lesson-03-timeline-{place}.png")
    move_panel(page)
    lesson.shoot(shots / "lesson-03-panel.png")
    output = page.locator(".jp-OutputArea-output pre").first
    assert output.evaluate("(text) => getComputedStyle(text).wordBreak") == "normal"  # lines end between words
    move_timeline(page, timelines.first)
    assert lesson.console == []
    assert lesson.offsite == []


def move_panel(page):
    """Move the first panel that has a slider, by key and by mouse."""
    slider = page.locator(".noUi-handle").first
    slider.scroll_into_view_if_needed()
    box = (
        page.locator(".widget-vbox", has=page.locator(".distlab-picture"))
        .filter(has=page.locator(".noUi-handle"))
        .first
    )
    image = box.locator(".distlab-picture img")
    track = box.locator(".noUi-target").first.bounding_box()
    source = image.get_attribute("src")
    changed = "([image, source]) => image.src !== source && image.naturalWidth > 0"
    slider.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.wait_for_function(changed, arg=[image.element_handle(), source], timeout=60_000)
    page.wait_for_timeout(1000)
    source = image.get_attribute("src")
    page.mouse.click(track["x"] + 0.7 * track["width"], track["y"] + track["height"] / 2)
    page.wait_for_function(changed, arg=[image.element_handle(), source], timeout=60_000)


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
