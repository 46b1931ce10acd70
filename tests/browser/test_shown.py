"""A picture of `show()` or of an object is a white card on JupyterLab's dark theme, and scrolls on a narrow page."""

import pytest

CELLS = [
    "%load_ext distlab.course.notebook",
    "from simulator.viz import draw_mesh\nfrom distlab.plan import Mesh",
    "show(draw_mesh(Mesh([('data', 4)])), 'four')",
    "Mesh([('data', 2), ('tensor', 2)])",
]
SEEN = """(image) => [image.alt, image.complete && image.naturalWidth > 0, image.getBoundingClientRect().width]"""


@pytest.fixture(scope="module")
def notebook(open_cells):
    with open_cells("shown", CELLS) as opened:
        opened.run_all()
        opened.page.locator(".distlab-scrolls > img").nth(1).wait_for()
        yield opened


@pytest.mark.parametrize(("place", "alt"), [(0, "4 ranks = data (4)"), (1, "4 ranks = data (2) x tensor (2)")])
def test_a_picture_is_seen_on_a_dark_page_and_has_alt_text(notebook, shots, place, alt):
    image = notebook.page.locator(".distlab-scrolls > img").nth(place)
    image.scroll_into_view_if_needed()
    notebook.page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    try:
        assert image.evaluate(SEEN)[:2] == [alt, True]
        notebook.shoot(shots / f"dark_{place}.png")
    finally:
        notebook.page.evaluate("document.body.dataset.jpThemeLight = 'true'")


def test_a_narrow_page_scrolls_a_picture_that_can_be_read(notebook, shots):
    page, image = notebook.page, notebook.page.locator(".distlab-scrolls > img").first
    page.set_viewport_size({"width": 700, "height": 900})
    image.scroll_into_view_if_needed()
    notebook.shoot(shots / "narrow.png")
    assert image.evaluate(SEEN)[2] == pytest.approx(796, abs=2)
    room = image.evaluate("(image) => image.parentElement.clientWidth")
    assert room < 700
    assert image.evaluate("(image) => image.parentElement.scrollWidth") > room
