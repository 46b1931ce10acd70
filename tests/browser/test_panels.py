"""Panels and timelines: on a low screen, to a screen reader, and in JupyterLab's dark theme as in its light one."""

import pytest
import speed

THEMES = ("JupyterLab Dark", "JupyterLab Light")
LEAST_CONTRAST = 4.5  # of letters on their paper
WORDS = ".distlab-timeline, .distlab-picture, .widget-label, .widget-readout"
# Colours as numbers from 0 to 1, and what lies behind an element: the first paper that is not transparent.
COLOURS = """
    const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
    const parts = (text) => [...numbers(text).slice(0, 3), numbers(text)[3] ?? 1];
    const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, share, i) => sum + share * (c[i] / 255 <= 0.04045 ?
        c[i] / 255 / 12.92 : ((c[i] / 255 + 0.055) / 1.055) ** 2.4), 0);
    const contrast = (one, two) => { const [a, b] = [light(one), light(two)].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05); };
    const paperOf = (one) => { for (let at = one; at; at = at.parentElement) {
        const paper = parts(getComputedStyle(at).backgroundColor); if (paper[3] > 0.5) return paper; } };
"""
FAINT_WORDS = f"""([where, least]) => {{ {COLOURS}
    const boxes = [...document.querySelectorAll(where)].flatMap((box) => [box, ...box.querySelectorAll("*")]);
    const ownWords = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const seen = [...new Set(boxes)].filter((one) => one.checkVisibility() && one.tagName !== "STYLE" && ownWords(one));
    const faint = seen.filter((one) => contrast(parts(getComputedStyle(one).color), paperOf(one)) < least);
    return [seen.length, faint.map((one) => `${{one.tagName}} ${{one.className}}: ${{one.textContent.slice(0, 60)}}`)];
}}"""
# The names of rows stand at a canvas's left edge, on the page's paper: their strongest pixel is the letters' colour.
ROW_NAMES = f"""(canvas) => {{ {COLOURS}
    const data = canvas.getContext("2d").getImageData(0, 0, 60, canvas.height).data, paper = paperOf(canvas);
    let most = 1;
    for (let at = 0; at < data.length; at += 4)
        if (data[at + 3] > 200) most = Math.max(most, contrast([data[at], data[at + 1], data[at + 2]], paper));
    return most;
}}"""
OWN_PAPER = f"""(image) => {{ {COLOURS}
    const style = getComputedStyle(image);
    return [style.opacity, style.filter, light(parts(style.backgroundColor))];
}}"""


@pytest.fixture
def low(notebook):
    """The page in a low window."""
    usual = notebook.page.viewport_size
    notebook.page.set_viewport_size({"width": 1024, "height": 700})
    yield notebook.page
    notebook.page.set_viewport_size(usual)


def test_a_slider_with_options_reads_out_its_option(low):
    panel = low.locator(".widget-vbox", has=low.locator(".distlab-picture")).last
    slider = speed.slider_of(panel, "tensor")
    slider.scroll_into_view_if_needed()
    slider.focus()
    for key, option in (("ArrowLeft", "4"), ("ArrowRight", "8")):
        low.keyboard.press(key)
        read = "([slider, option]) => slider.getAttribute('aria-valuetext') === option"
        low.wait_for_function(read, arg=[slider.element_handle(), option], timeout=60_000)
        assert slider.get_attribute("aria-valuenow") != f"{option}.0", "the option's place among all"


def test_every_slider_has_its_labels_name(low):
    sliders = low.locator(".widget-hslider")
    assert sliders.count() > 4
    names = [slider.locator(".noUi-handle").get_attribute("aria-label") for slider in sliders.all()]
    assert names == [slider.locator(".widget-label").inner_text() for slider in sliders.all()]
    assert all(names)


def test_a_picture_stands_above_many_controls(low):
    panel = low.locator(".widget-vbox", has=low.locator(".distlab-picture")).last
    sliders = panel.locator(".widget-hslider")
    top = panel.locator("img").bounding_box()["y"]
    assert sliders.count() > 4
    assert all(top < slider.bounding_box()["y"] for slider in sliders.all())
    few = low.locator(".widget-vbox", has=low.locator(".distlab-picture")).first
    assert few.locator("img").bounding_box()["y"] > few.locator(".widget-hslider").first.bounding_box()["y"]


@pytest.fixture(params=THEMES)
def page(request, notebook):
    change = "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"
    notebook.page.evaluate(change, request.param)
    notebook.page.wait_for_function(f"() => document.body.dataset.jpThemeName === {request.param!r}")
    notebook.page.wait_for_timeout(500)  # a theme's colours arrive after its name
    return notebook.page


def test_words_of_panels_and_timelines_have_contrast(page):
    seen, faint = page.evaluate(FAINT_WORDS, [WORDS, LEAST_CONTRAST])
    assert seen > 20
    assert faint == []


def test_row_names_on_canvases_have_contrast(page, notebook, shots):
    for place, canvas in enumerate(page.locator(".distlab-timeline canvas").all()[:1]):
        canvas.scroll_into_view_if_needed()
        sharp = "(canvas) => canvas.dataset.sharp === 'true'"
        page.wait_for_function(sharp, arg=canvas.element_handle(), timeout=60_000)
        dark = page.evaluate("document.body.dataset.jpThemeLight") == "false"
        notebook.shoot(shots / f"timeline-{place}-{'dark' if dark else 'light'}.png")
        strong = f"(canvas) => ({ROW_NAMES})(canvas) >= {LEAST_CONTRAST}"
        page.wait_for_function(strong, arg=canvas.element_handle(), timeout=60_000)


def test_a_panels_picture_keeps_its_white_paper(page, notebook, shots):
    for image in page.locator(".distlab-picture img").all():
        image.scroll_into_view_if_needed()
        assert image.evaluate(OWN_PAPER) == ["1", "none", 1]
    notebook.shoot(shots / f"panel-{page.evaluate('document.body.dataset.jpThemeLight')}.png")


def test_the_measure_finds_faint_words(notebook):
    late = notebook.page.add_style_tag(
        content=".distlab-picture figcaption { color: #888 !important; background: #777 }"
    )
    try:
        assert notebook.page.evaluate(FAINT_WORDS, [".distlab-picture", LEAST_CONTRAST])[1]
    finally:
        late.evaluate("(style) => style.remove()")


SEEN = """(image) => [image.alt, image.complete && image.naturalWidth > 0, image.getBoundingClientRect().width]"""


def test_a_shown_picture_is_seen_on_a_dark_page_and_a_narrow_one_scrolls_it(notebook, shots):
    page, images = notebook.page, notebook.page.locator(".distlab-scrolls > img")
    for place, alt in ((0, "4 ranks = data (4)"), (1, "4 ranks = data (2) x tensor (2)")):
        images.nth(place).scroll_into_view_if_needed()
        page.evaluate("document.body.dataset.jpThemeLight = 'false'")
        try:
            assert images.nth(place).evaluate(SEEN)[:2] == [alt, True]
            notebook.shoot(shots / f"dark_{place}.png")
        finally:
            page.evaluate("document.body.dataset.jpThemeLight = 'true'")
    usual, image = page.viewport_size, images.first
    page.set_viewport_size({"width": 700, "height": 900})
    image.scroll_into_view_if_needed()
    notebook.shoot(shots / "narrow.png")
    assert image.evaluate(SEEN)[2] == pytest.approx(796, abs=2)
    room = image.evaluate("(image) => image.parentElement.clientWidth")
    assert room < 700
    assert image.evaluate("(image) => image.parentElement.scrollWidth") > room
    page.set_viewport_size(usual)
