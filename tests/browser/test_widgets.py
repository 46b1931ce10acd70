"""Panel and Timeline in a real browser: keys and mouse change the picture, quickly, and nothing leaves here.

On a low screen, to a screen reader, and in JupyterLab's dark theme as in its light one.
"""

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


def test_sliders_have_names_and_read_out_options_and_a_picture_stands_above_many(low):
    sliders = low.locator(".widget-hslider").all()
    names = [slider.locator(".noUi-handle").get_attribute("aria-label") for slider in sliders]
    assert names == [slider.locator(".widget-label").inner_text() for slider in sliders]
    assert all(names)
    panels = low.locator(".widget-vbox", has=low.locator(".distlab-picture"))
    slider = speed.slider_of(panels.last, "tensor")
    slider.scroll_into_view_if_needed()
    slider.focus()
    for key, option in (("ArrowLeft", "4"), ("ArrowRight", "8")):
        low.keyboard.press(key)
        read = "([slider, option]) => slider.getAttribute('aria-valuetext') === option"
        low.wait_for_function(read, arg=[slider.element_handle(), option])
        assert slider.get_attribute("aria-valuenow") != f"{option}.0", "the option's place among all"
    top, own = panels.last.locator("img").bounding_box()["y"], panels.last.locator(".widget-hslider").all()
    assert len(own) > 4
    assert all(top < slider.bounding_box()["y"] for slider in own)
    few = panels.first
    assert few.locator("img").bounding_box()["y"] > few.locator(".widget-hslider").first.bounding_box()["y"]


@pytest.fixture(params=THEMES)
def page(request, notebook):
    change = "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"
    notebook.page.evaluate(change, request.param)
    notebook.page.wait_for_function(f"() => document.body.dataset.jpThemeName === {request.param!r}")
    notebook.page.wait_for_timeout(500)  # a theme's colours arrive after its name
    return notebook.page


def test_words_and_row_names_have_contrast_and_pictures_white_paper(page, notebook):
    seen, faint = page.evaluate(FAINT_WORDS, [WORDS, LEAST_CONTRAST])
    assert (seen > 20, faint) == (True, [])
    assert len(page.evaluate(FAINT_WORDS, [WORDS, 21.5])[1]) == seen, "no words have more contrast than black on white"
    found = canvas(page, 0)
    page.wait_for_function(f"(canvas) => ({ROW_NAMES})(canvas) >= {LEAST_CONTRAST}", arg=found.element_handle())
    for image in page.locator(".distlab-picture img").all():
        image.scroll_into_view_if_needed()
        assert image.evaluate(OWN_PAPER) == ["1", "none", 1]


SEEN = """(image) => [image.alt, image.complete && image.naturalWidth > 0, image.getBoundingClientRect().width]"""


def test_a_shown_picture_is_seen_on_a_dark_page_and_a_narrow_one_shows_all_of_it(notebook):
    page, images = notebook.page, notebook.page.locator(".jp-RenderedHTML > img")
    idle = "This schedule (1 ms per F, I and W) leaves 25.0 % of 2 ranks' time idle"
    for place, alt in ((0, "4 ranks = data (4)"), (1, idle)):
        images.nth(place).scroll_into_view_if_needed()
        page.evaluate("document.body.dataset.jpThemeLight = 'false'")
        try:
            assert images.nth(place).evaluate(SEEN)[:2] == [alt, True]
        finally:
            page.evaluate("document.body.dataset.jpThemeLight = 'true'")
    usual, image = page.viewport_size, images.first
    page.set_viewport_size({"width": 700, "height": 900})
    image.scroll_into_view_if_needed()
    room, whole = image.evaluate("(image) => [image.parentElement.clientWidth, image.parentElement.scrollWidth]")
    assert 250 < image.evaluate(SEEN)[2] <= room == whole < 700
    page.set_viewport_size(usual)


def picture(page, place):
    return page.locator(".distlab-picture").nth(place)


def canvas(page, place):
    found = page.locator(".distlab-timeline canvas").nth(place)
    found.scroll_into_view_if_needed()
    page.wait_for_function("(canvas) => canvas.dataset.sharp === 'true'", arg=found.element_handle())
    return found


def pixels(found):
    return found.evaluate("(canvas) => canvas.toDataURL()")


def view(found):
    return tuple(float(edge) for edge in found.evaluate("(canvas) => canvas.dataset.view").split())


def after(page, found, act):
    """Do something and return the canvas's view and pixels once it shows a different view at full sharpness."""
    before = found.evaluate("(canvas) => canvas.dataset.view")
    act()
    ready = "([canvas, before]) => canvas.dataset.view !== before && canvas.dataset.sharp === 'true'"
    page.wait_for_function(ready, arg=[found.element_handle(), before])
    return view(found), pixels(found)


def next_source(page, image, act):
    before = image.get_attribute("src")
    act()
    changed = "([image, before]) => image.src !== before && image.complete && image.naturalWidth > 0"
    page.wait_for_function(changed, arg=[image.element_handle(), before])
    return image.get_attribute("src")


def test_a_panels_slider_moves_by_keyboard_by_mouse_and_by_code(notebook):
    page, image = notebook.page, picture(notebook.page, 0).locator("img")
    slider = page.locator(".noUi-handle").first
    slider.scroll_into_view_if_needed()
    slider.focus()
    next_source(page, image, lambda: page.keyboard.press("ArrowRight"))
    assert slider.get_attribute("aria-valuenow") == "5.0"
    assert "Timeline of 5 ranks" in picture(page, 0).locator("figcaption").inner_text()
    track = page.locator(".noUi-target").first.bounding_box()
    next_source(page, image, lambda: page.mouse.click(track["x"] + 2, track["y"] + track["height"] / 2))
    assert "Timeline of 1 rank over" in picture(page, 0).locator("figcaption").inner_text()
    assert image.get_attribute("alt").startswith("Compute fills")
    assert notebook.execute("print(panel.controls['ranks'].value, panel.text)").startswith("1 Timeline of 1 rank")
    wide = image.bounding_box()["width"]
    next_source(page, image, lambda: notebook.execute("panel.controls['ranks'].value = 3"))
    assert page.locator(".noUi-handle").first.get_attribute("aria-valuenow") == "3.0"
    assert image.bounding_box()["width"] == wide


def test_fast_moves_draw_the_newest_value_only(notebook):
    page = notebook.page
    slider = page.locator(".noUi-handle").nth(2)
    slider.scroll_into_view_if_needed()
    slider.focus()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    line = picture(page, 1).locator("figcaption").element_handle()
    page.wait_for_function("(line) => line.textContent === 'size 20'", arg=line)
    drawn = notebook.execute("print(*drawn)").split()
    assert (drawn[0], drawn[-1]) == ("0", "20")
    assert len(drawn) < 16, f"20 key presses drew {len(drawn)} pictures: {drawn}"


def test_an_error_is_read_where_the_picture_was(notebook):
    page, panel = notebook.page, picture(notebook.page, 2)
    slider = page.locator(".noUi-handle").nth(3)
    slider.scroll_into_view_if_needed()
    slider.focus()
    page.keyboard.press("ArrowRight")
    line = panel.locator("figcaption.failed")
    line.wait_for()
    assert line.inner_text() == "No picture for ranks = 3: ValueError: 12 layers cannot fill 3 stages"
    assert not panel.locator("img").is_visible()
    page.keyboard.press("ArrowRight")
    panel.locator("img").wait_for()
    assert panel.locator("figcaption.failed").count() == 0


def test_a_timeline_moves_by_keyboard(notebook):
    page, found = notebook.page, canvas(notebook.page, 0)
    found.focus()
    whole, first = view(found), pixels(found)
    zoomed, seen = after(page, found, lambda: page.keyboard.press("+"))
    assert zoomed[1] - zoomed[0] < whole[1] - whole[0]
    assert seen != first
    moved, _ = after(page, found, lambda: page.keyboard.press("ArrowRight"))
    assert moved[0] > zoomed[0]
    assert after(page, found, lambda: page.keyboard.press("Home"))[0][0] == 0.0
    assert after(page, found, lambda: page.keyboard.press("End"))[0][1] == pytest.approx(whole[1])
    out, _ = after(page, found, lambda: page.keyboard.press("-"))
    assert out[1] - out[0] > zoomed[1] - zoomed[0]
    page.keyboard.press("0")
    page.keyboard.press("0")
    page.wait_for_timeout(300)
    assert view(found) == whole
    assert page.locator(".jp-Dialog").count() == 0  # JupyterLab's own 0 0 restarts the kernel
    assert pixels(found) == first


def test_a_timeline_moves_by_mouse(notebook):
    page, found = notebook.page, canvas(notebook.page, 1)
    box = found.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + 60
    page.mouse.click(x, y)
    whole = view(found)

    def wheel():
        page.mouse.wheel(0, -400)

    zoomed, _ = after(page, found, wheel)
    assert zoomed[1] - zoomed[0] < 0.8 * (whole[1] - whole[0])
    before = pixels(found)
    page.mouse.move(x, y)
    page.mouse.down()
    moved, seen = after(page, found, lambda: page.mouse.move(x - 150, y, steps=3))
    page.mouse.up()
    assert moved[0] > zoomed[0]
    assert moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])
    assert seen != before
    page.mouse.move(x, y + 20)
    page.mouse.move(x, y)
    page.locator(".distlab-timeline").nth(1).locator("button", has_text="all").click()
    page.wait_for_function("(canvas) => canvas.dataset.view.startsWith('0 ')", arg=found.element_handle())
    assert view(found) == whole


def test_pointing_at_a_box_and_stepping_by_key_read_the_span(notebook):
    page, found = notebook.page, canvas(notebook.page, 0)
    after(page, found, lambda: notebook.execute("some.view = (0.0, 0.1)"))
    tip = page.locator(".distlab-timeline .tip").first
    box = found.bounding_box()
    left = box["x"] + found.evaluate("(canvas) => canvas.clientWidth") * 0.12
    page.mouse.move(left, box["y"] + 30)
    page.mouse.move(left + 3, box["y"] + 31)
    tip.wait_for()
    assert "rank 0, compute: forward" in tip.inner_text()
    assert "starts at 0 ns, takes 10 ms" in tip.inner_text()
    found.focus()
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.keyboard.press("n")
    page.keyboard.press("n")
    assert tip.is_visible()
    assert "rank" in tip.inner_text()
    page.keyboard.press("0")


def test_columns_say_their_share_and_a_narrow_view_has_boxes(notebook):
    page, found = notebook.page, canvas(notebook.page, 1)
    assert found.evaluate("(canvas) => canvas.dataset.form") == "pixels"
    box = found.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    page.mouse.move(box["x"] + box["width"] / 2 + 2, box["y"] + 101)
    tip = page.locator(".distlab-timeline .tip").nth(1)
    tip.wait_for()
    assert "zoom in to see single spans" in tip.inner_text()
    after(page, found, lambda: notebook.execute("many.view = (2.0, 2.2)"))
    assert found.evaluate("(canvas) => canvas.dataset.form") == "boxes"
    assert 1000 < int(found.evaluate("(canvas) => canvas.dataset.count")) < 4000
    after(page, found, lambda: notebook.execute("many.view = (0, many.limit_s)"))


def test_colours_that_arrive_after_the_name_of_their_theme_are_drawn(notebook):
    page, found = notebook.page, canvas(notebook.page, 0)
    data = "new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer)"
    magenta = f"{data}.includes(0xffff00ff)"
    late = page.add_style_tag(content=".distlab-timeline { --jp-content-font-color1: #f0f; }")
    page.wait_for_function(f"(canvas) => {magenta}", arg=found.element_handle())
    late.evaluate("(style) => style.remove()")
    page.wait_for_function(f"(canvas) => !{magenta}", arg=found.element_handle())


def test_a_schedule_follows_its_controls_its_clock_and_its_text(notebook):
    page = notebook.page
    panel = page.locator(".widget-vbox", has=page.locator(".distlab-timeline")).nth(0)
    found, line = canvas(page, 2), panel.locator("figcaption")
    whole = pixels(found)
    speed.slider_of(panel, "step through").focus()
    page.keyboard.press("Home")
    page.wait_for_function("(line) => line.textContent.startsWith('At 0 s')", arg=line.element_handle())
    assert "rank 1 waits for 0F0 of rank 0" in line.inner_text()
    page.wait_for_function("([c, whole]) => c.toDataURL() !== whole", arg=[found.element_handle(), whole])
    page.keyboard.press("End")
    page.wait_for_function("(line) => line.textContent.startsWith('1F1B on')", arg=line.element_handle())
    speed.slider_of(panel, "micro-batches").focus()
    after(page, found, lambda: page.keyboard.press("ArrowRight"))
    assert "1F1B on 16 ranks and 64 micro-batches" in line.inner_text()


def test_a_builder_in_a_notebook_tells_python_what_stands_and_shows_what_was_run(notebook):
    page, box = notebook.page, notebook.page.locator(".distlab-builder")
    box.locator("canvas").focus()
    page.keyboard.press("f")
    page.wait_for_timeout(300)  # the text is sent when no key has been pressed for 0.12 s
    assert notebook.execute("print(builder.text)") == "0F0\n,\n"
    notebook.execute("builder.text = '0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1'")
    page.wait_for_function("(line) => line.textContent.startsWith('Read.')", arg=box.locator(".line").element_handle())
    box.get_by_role("button", name="Run on real ranks").click()
    box.locator(".report img").wait_for()
    assert "Timeline of 2 ranks" in box.locator(".line").inner_text()
    assert notebook.execute("print(builder.picture.words)").startswith("Your schedule on 2 ranks and 2 micro-batches")
