"""A newcomer's way: `distlab lesson start`, open a lesson, run all cells, and move what moves.

`make test` opens lesson 01 as it is given out, the shortest with a panel and a timeline; `make soak` opens every other
lesson, with the solutions in its cells.
"""

import json
import shutil

import pytest
from browser_lab import ROOT, open_notebook, write_notebook

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


@pytest.mark.timeout(400)
def test_every_cell_of_lesson_01_runs_and_its_pictures_move(server):
    _, base, token = server
    with open_notebook(f"{base}/lab/tree/{LESSON}/{LESSON}.ipynb?token={token}", base) as lesson:
        lesson.run_all(timeout_s=280)
        page = lesson.page
        page.locator(".distlab-picture img").first.wait_for()
        move_all(lesson)
        assert page.locator(".distlab-timeline canvas").count() >= 1
        output = page.locator(".jp-OutputArea-output pre").first
        assert output.evaluate("(text) => getComputedStyle(text).wordBreak") == "normal"  # lines end between words


ASKED = ["%load_ext distlab.course.notebook"]
ASKED += ["one = predict('How long?', 'ms'); one", "two = predict('How far?', 'm'); two"]
ASKED += ["print('secret', one.compare(5))", "two.lock(); print('hidden'); value = two.compare(7)"]


@pytest.mark.timeout(400)
def test_what_answers_a_question_opens_with_a_number_or_by_show_me_and_only_the_number_is_kept(server):
    work, base, token = server
    write_notebook(work / "asked.ipynb", ASKED)
    with open_notebook(f"{base}/lab/tree/asked.ipynb?token={token}&reset", base) as lesson:
        lesson.run_all()
        first, second = (lesson.page.locator(".jp-OutputArea pre", has_text=text) for text in ("secret", "hidden"))
        lesson.page.get_by_text("Predict first: How far?").last.wait_for()
        assert (first.count(), first.is_visible(), second.count(), second.is_visible()) == (1, False, 1, False)
        lesson.page.get_by_placeholder("your number").first.fill("4")
        lesson.page.keyboard.press("Enter")
        first.wait_for()
        lesson.page.get_by_text("(you predicted 4 ms, measured 5 ms: 1.2x too little)").last.wait_for()
        assert not second.is_visible()
        lesson.page.locator("button", has_text="Show me").last.click()
        second.wait_for()
        assert (lesson.trouble(), lesson.console, lesson.offsite) == ([], [], [])
    kept = json.loads((work / "progress.json").read_text())
    assert [*kept["predictions"].items(), *kept["measured"].values()] == [("How long? (ms)", 4.0), 7.0, 5.0]


@pytest.mark.soak  # 14 whole lessons, half a minute each on a machine that does nothing else
@pytest.mark.timeout(600)
@pytest.mark.parametrize("folder", OTHERS, ids=lambda folder: folder[:2])
def test_every_cell_of_a_solution_runs_and_its_pictures_move(server, folder):
    work, base, token = server
    shutil.copy(ROOT / "lessons" / folder / SOLUTION, work / folder / SOLUTION)
    with open_notebook(f"{base}/lab/tree/{folder}/{SOLUTION}?token={token}&reset", base) as lesson:
        lesson.run_all(timeout_s=500)
        move_all(lesson)


def move_all(lesson):
    """Move each panel and each timeline of a notebook that has run; all have names, and nothing went wrong."""
    page = lesson.page
    assert page.evaluate(NAMELESS) == []
    boxes = page.locator(".widget-vbox", has=page.locator(".distlab-picture"))
    panels = boxes.filter(has=page.locator(".noUi-handle"))
    for place in range(panels.count()):
        move_panel(page, panels.nth(place))
    timelines = page.locator(".distlab-timeline canvas")
    for place in range(timelines.count()):
        move_timeline(page, timelines.nth(place))
    assert page.locator(".distlab-picture figcaption.failed").count() == 0
    assert (lesson.trouble(), lesson.console, lesson.offsite) == ([], [], [])


def move_panel(page, box):
    """Move a panel's first slider, by key and by mouse; each shows a different picture, or its words change."""
    slider, image = box.locator(".noUi-handle").first, box.locator(".distlab-picture img")
    slider.scroll_into_view_if_needed()
    slider.focus()
    at_end = slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemax")
    key, track = "ArrowLeft" if at_end else "ArrowRight", box.locator(".noUi-target").first
    for act in (lambda: page.keyboard.press(key), lambda: click(page, track)):
        before = image.get_attribute("src"), box.inner_text()
        act()
        changed = "([box, image, [source, text]]) => image.src !== source || box.innerText !== text"
        page.wait_for_function(changed, arg=[box.element_handle(), image.element_handle(), before])
        page.wait_for_timeout(1000)


def click(page, track):
    """Click where the handle is not: near the end of a track that is further away."""
    handle, bar = track.locator(".noUi-handle").bounding_box(), track.bounding_box()
    right = handle["x"] + handle["width"] / 2 < bar["x"] + bar["width"] / 2
    page.mouse.click(bar["x"] + (0.9 if right else 0.1) * bar["width"], bar["y"] + bar["height"] / 2)


def move_timeline(page, canvas):
    """Zoom by key, then drag by mouse; each shows a different view and different pixels."""
    canvas.scroll_into_view_if_needed()
    for act in (zoom_in, drag):
        before = canvas.evaluate("(canvas) => [canvas.dataset.view, canvas.toDataURL()]")
        act(page, canvas)
        other = "([canvas, [view, pixels]]) => canvas.dataset.view !== view && canvas.toDataURL() !== pixels"
        page.wait_for_function(other, arg=[canvas.element_handle(), before])


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
