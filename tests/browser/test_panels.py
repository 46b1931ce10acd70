"""Panels on a low screen and to a screen reader: where the picture stands, and what a slider reads out."""

import pytest
import speed


@pytest.fixture(scope="module")
def notebook(open_cells):
    with open_cells("panels", [*speed.CELLS[:2], *speed.DEGREES]) as opened:
        opened.page.set_viewport_size({"width": 1024, "height": 700})
        opened.run_all()
        opened.page.locator(".distlab-picture img").nth(1).wait_for()
        yield opened
        assert opened.trouble() == []
        assert opened.console == []


def test_a_slider_with_options_reads_out_its_option(notebook):
    page = notebook.page
    panel = page.locator(".widget-vbox", has=page.locator(".distlab-picture")).last
    slider = speed.slider_of(panel, "tensor")
    slider.scroll_into_view_if_needed()
    slider.focus()
    for key, option in (("ArrowLeft", "4"), ("ArrowRight", "8")):
        page.keyboard.press(key)
        read = "([slider, option]) => slider.getAttribute('aria-valuetext') === option"
        page.wait_for_function(read, arg=[slider.element_handle(), option], timeout=60_000)
        assert slider.get_attribute("aria-valuenow") != f"{option}.0", "the option's place among all"


def test_every_slider_has_its_labels_name(notebook):
    sliders = notebook.page.locator(".widget-hslider")
    assert sliders.count() > 4
    names = [slider.locator(".noUi-handle").get_attribute("aria-label") for slider in sliders.all()]
    assert names == [slider.locator(".widget-label").inner_text() for slider in sliders.all()]
    assert all(names)


def test_a_picture_stands_above_many_controls(notebook):
    page = notebook.page
    panel = page.locator(".widget-vbox", has=page.locator(".distlab-picture")).last
    sliders = panel.locator(".widget-hslider")
    top = panel.locator("img").bounding_box()["y"]
    assert sliders.count() > 4
    assert all(top < slider.bounding_box()["y"] for slider in sliders.all())
    few = page.locator(".widget-vbox", has=page.locator(".distlab-picture")).first
    assert few.locator("img").bounding_box()["y"] > few.locator(".widget-hslider").first.bounding_box()["y"]
