"""What the browser tests share: the harness on the path, and one line that says what is missing."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import speed  # noqa: E402
from browser_lab import CHROMIUM_FLAGS, find_chromium, missing, open_notebook, serve, write_notebook  # noqa: E402

SLOW = """
import time
drawn = []
def slow(size):
    time.sleep(0.25)
    drawn.append(size)
    figure, text = draw(2, 3)
    return figure, f"size {size}"
busy = Panel(slow, size=ipywidgets.IntSlider(0, min=0, max=40)); busy
"""
FAILING = """
def sometimes(ranks):
    if ranks == 3:
        raise ValueError("12 layers cannot fill 3 stages")
    return draw(ranks, 3)
failing = Panel(sometimes, ranks=ipywidgets.IntSlider(2, min=1, max=4)); failing
"""
BUILDER = """
from simulator.viz import schedule_builder
builder = schedule_builder(level=1, on_ranks=lambda schedule: draw_timeline(pipeline(2, 4))); builder
"""
SHOWN = [
    "%load_ext distlab.course.notebook",
    "from simulator.viz import draw_mesh\nfrom distlab.plan import Mesh",
    "show(draw_mesh(Mesh([('data', 4)]), devices_per_node=4), 'four')",
    "from distlab.plan import one_f_one_b\none_f_one_b(2, 3)",
]


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The lessons, served from a work folder of their own: (folder, address, token)."""
    work = tmp_path_factory.mktemp("work")
    with serve(work) as (base, token):
        yield work, base, token


@pytest.fixture(scope="module")
def notebook(server):
    """One notebook with panels, timelines and pictures, for all tests; each leaves it as it was."""
    work, base, token = server
    cells = [*speed.CELLS, SLOW, FAILING, *speed.SCHEDULES, BUILDER, *SHOWN, *speed.DEGREES]
    write_notebook(work / "widgets.ipynb", cells)
    with open_notebook(f"{base}/lab/tree/widgets.ipynb?token={token}&reset", base) as opened:
        opened.run_all()
        opened.page.locator(".distlab-picture img").nth(2).wait_for()
        opened.page.locator(".jp-RenderedHTML > img").nth(1).wait_for()
        yield opened
        assert (opened.trouble(), opened.console, opened.offsite) == ([], [], [])


@pytest.fixture(scope="module")
def chromium():
    """A browser, gone after these tests: the other modules start their own, and only one can be driven at a time."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium(), headless=True, args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()


def pytest_collection_modifyitems(items):
    """Skip every browser test where there is no browser."""
    lacks = missing()
    for item in items:
        if lacks and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=lacks))


def pytest_terminal_summary(terminalreporter):
    """Say in one line that the browser tests were skipped, and why."""
    if lacks := missing():
        terminalreporter.write_line(f"browser tests are skipped: {lacks}")
