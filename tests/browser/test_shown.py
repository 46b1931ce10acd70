"""A picture of `show()` or of an object follows JupyterLab's theme, and scrolls where the page is narrow."""

import pytest

CELLS = [
    "%load_ext distlab.notebook",
    "from simulator.viz import mesh_figure\nfrom distlab.plan import Mesh",
    "show(mesh_figure(Mesh([('data', 4)])), 'four')",
    "Mesh([('data', 2), ('tensor', 2)])",
]
SEEN = """(image) => {
  const page = getComputedStyle(image.parentElement);
  return [getComputedStyle(image).opacity, page.backgroundImage.slice(0, 15), image.getBoundingClientRect().width];
}"""


@pytest.fixture(scope="module")
def notebook(open_cells):
    with open_cells("shown", CELLS) as opened:
        opened.run_all()
        opened.page.locator("[class^=distlab-] > img").nth(1).wait_for()
        yield opened


@pytest.mark.parametrize("place", [0, 1], ids=["show", "object"])
def test_a_picture_follows_the_theme(notebook, shots, place):
    image = notebook.page.locator("[class^=distlab-] > img").nth(place)
    image.scroll_into_view_if_needed()
    opacity, behind, _ = image.evaluate(SEEN)
    assert (opacity, behind) == ("1", "none")
    notebook.page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    try:
        opacity, behind, _ = image.evaluate(SEEN)
        assert (opacity, behind) == ("0", 'url("data:image')
        notebook.shoot(shots / f"dark_{place}.png")
    finally:
        notebook.page.evaluate("document.body.dataset.jpThemeLight = 'true'")


def test_a_narrow_page_scrolls_a_picture_that_can_be_read(notebook, shots):
    page, image = notebook.page, notebook.page.locator("[class^=distlab-] > img").first
    page.set_viewport_size({"width": 700, "height": 900})
    image.scroll_into_view_if_needed()
    notebook.shoot(shots / "narrow.png")
    assert image.evaluate(SEEN)[2] == pytest.approx(796, abs=2)
    room = image.evaluate("(image) => image.parentElement.parentElement.clientWidth")
    assert room < 700
    assert image.evaluate("(image) => image.parentElement.parentElement.scrollWidth") > room
