"""The website, opened as files in a real Chromium: it plays, is searched, and asks for nothing elsewhere."""

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from browser_lab import Notebook

ROOT = Path(__file__).resolve().parents[2]
FRONT, LESSON, PACKAGE = "docs/index.html", "lessons/09_pipeline/lesson.html", "docs/api/distlab.collectives.html"

pytestmark = pytest.mark.timeout(395)  # the first test waits for the site


PACKAGES = "distlab.collectives distlab.trace simulator.engine"  # pages lead to the first two


SPHINX = "import gc, sys; gc.disable(); from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"


def build(folder, **chosen):
    """Build the site; warnings are errors, as in `make docs`. Lists and garbage would take a third of the time."""
    command = [sys.executable, "-c", SPHINX, "-q", "-W", "--keep-going", "-D", "toc_object_entries=0"]
    command += ["-c", "docs/site", ".", str(folder)]
    environment = os.environ | {f"DISTLAB_DOCS_{name.upper()}": value for name, value in chosen.items()}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site with one lesson and a few packages."""
    return build(tmp_path_factory.mktemp("site"), lessons="09_*", packages=PACKAGES)


@pytest.fixture
def open_page(site, chromium):
    """Open a page of the site as a file; no page may ask for anything else, or complain."""
    opened = []

    def show(name, *, dark=False, width=1280):
        scheme = "dark" if dark else "light"
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        watched = Notebook(page, "file:")
        watched.watch()
        opened.append(watched)
        page.goto(f"file://{site / name}")
        return page

    yield show
    for watched in opened:
        watched.page.close()
        assert (watched.console, watched.offsite) == ([], [])


class Page(HTMLParser):
    """What a page links to, what can be linked to in it, its headings, and pictures without an alt text."""

    def __init__(self, path):
        super().__init__()
        self.links, self.ids, self.headings, self.silent = [], set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        self.links += [values[name] for name in ("href", "src") if values.get(name)]
        if tag in ("h1", "h2", "h3"):
            self.headings.append(tag)
        if tag == "img" and "alt" not in values:
            self.silent.append(values.get("src"))


def test_every_link_leads_somewhere_and_every_picture_has_words(site):
    check_links(site, 20)


@pytest.mark.soak  # the same of all packages and lessons
@pytest.mark.timeout(1800)
def test_every_link_of_the_whole_site_leads_somewhere(tmp_path):
    check_links(build(tmp_path), 80)


def check_links(site, num_pages):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            address, anchor = urldefrag(link)
            if address.startswith(("http:", "https:", "mailto:", "data:")):
                continue
            target = (path.parent / unquote(address.partition("?")[0])).resolve() if address else path
            if target.name == "lesson.html" and path.name in ("START.html", "GUIDES.html"):  # of lessons left out
                continue
            known = target not in pages or not anchor or unquote(anchor) in pages[target].ids
            if not (target.exists() and known):
                broken.append(f"{path.relative_to(site)}: {link}")
        assert page.silent == [], path
        assert page.headings.count("h1") == 1 or path.name in ("index.html", "search.html"), path
    assert broken == [], "\n".join(broken[:40])
    assert len(pages) > num_pages


def test_the_front_page_is_played_at_once(site, open_page):
    files = [(site / "docs" / link.partition("?")[0]).resolve() for link in Page(site / FRONT).links]
    assert sum(path.stat().st_size for path in {*files} if path.suffix in (".js", ".css", ".png", ".svg")) < 1_000_000
    for width, dark in ((390, True), (1920, False)):
        page = open_page(FRONT, dark=dark, width=width)
        page.locator(".distlab-builder canvas").focus()
        page.keyboard.press("f")
        assert page.evaluate("performance.now()") < 6000, "three times what an idle machine may take"
        assert page.locator(".distlab-builder .score").inner_text().startswith("1 of 16 placed")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    printed = json.loads((ROOT / "lessons/01_ranks_and_messages/lesson.ipynb").read_text())["cells"]
    outputs = ["".join(output.get("text", "")).strip() for cell in printed for output in cell.get("outputs", ())]
    assert page.locator(".highlight-text pre").inner_text().strip() in outputs, "a hang as lesson 1 printed it"
    first = open_page("docs/builder.html#level=2")
    first.locator(".distlab-builder canvas").focus()
    first.keyboard.press("f")
    first.wait_for_function("location.hash.includes('s=')")
    page = open_page(f"docs/builder.html{first.evaluate('location.hash')}")
    assert page.locator(".distlab-builder .score").inner_text().startswith("1 of 32 placed")


def test_every_control_of_a_computed_widget_changes_what_it_shows(open_page):
    page = open_page("docs/play.html")
    for name in ("step", "ring", "memory", "cost"):
        box = page.locator(f'.distlab-player[data-widget="{name}"][data-ready]')
        for control in box.locator("input, select").all():
            before, last = box.inner_html(), "(one) => Number(one.value) === Number(one.max || one.options.length - 1)"
            control.focus()
            page.keyboard.press("ArrowLeft" if control.evaluate(last) else "ArrowRight")
            assert box.inner_html() != before, (name, control.evaluate("(one) => one.labels[0].textContent"))


def test_a_lesson_has_landmarks_names_and_a_timeline_that_moves(open_page):
    page = open_page(LESSON)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#furo-main-content"
    for role in ("main", "navigation"):
        assert page.get_by_role(role).count() >= 1, role
    nameless = """() => [...document.querySelectorAll("main :is(input, select, button, canvas, a[href])")]
        .filter((one) => !(one.labels?.length || one.getAttribute("aria-label") || one.textContent.trim() || one.title))
        .map((one) => one.outerHTML.slice(0, 120))"""
    assert page.evaluate(nameless) == []
    assert page.get_by_text("open it on your machine: make lessons, then lesson 09").count() == 1
    page.get_by_role("textbox", name="Search").first.focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"

    asked, closed = page.locator("form.prediction"), page.locator(".cell_output[hidden]")
    assert asked.count() == closed.count() > 10
    asked.first.get_by_label("What part of the time does a GPU compute?").press_sequentially("30\n")
    assert page.get_by_text("simulated 24.97 %. You predicted 30 %.").is_visible()
    while asked.count():
        asked.last.get_by_role("button", name="Show me").click()
    assert (closed.count(), page.get_by_text("You gave no number.").count() > 3) == (0, True)
    box = page.locator('.distlab-player[data-widget="09_pipeline.both"][data-ready]')
    canvas = box.locator("canvas")
    canvas.scroll_into_view_if_needed()
    view = canvas.get_attribute("data-view")
    canvas.focus()
    page.keyboard.press("+")
    page.wait_for_function("([canvas, view]) => canvas.dataset.view !== view", arg=[canvas.element_handle(), view])
    clock = box.get_by_label("step through")
    clock.focus()
    page.keyboard.press("Home")
    assert "rank 0 runs" in box.locator("figcaption").inner_text()


def test_pages_are_light_and_dark_and_fit_a_phone(open_page):
    for name, dark in ((FRONT, True), (LESSON, False), (PACKAGE, True)):
        page = open_page(name, dark=dark)
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, paper[4:-1].split(",")[:3])) < 380) == dark, paper
        assert page.evaluate("document.body.dataset.jpThemeLight") == str(not dark).lower()
        page.set_viewport_size({"width": 400, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_search_finds_a_word_without_a_server(open_page):
    page = open_page(FRONT)
    page.get_by_role("textbox", name="Search").first.fill("halving")
    page.keyboard.press("Enter")
    page.locator("#search-results li a").first.wait_for()
    found = page.locator("#search-results li a").all_inner_texts()
    assert any("collectives" in text.lower() for text in found), found
