"""A Panel draws what its controls say, keeps picture and text for readers without a kernel, and loses no error."""

import base64

import ipywidgets
import pytest
from matplotlib.figure import Figure
from viz_traces import data_parallel

from distlab.faces import public_names
from simulator.viz import Panel, Picture, draw_timeline
from simulator.viz.drawing.plot import put_title
from simulator.viz.drawing.theme import DPI


def picture(title):
    figure = Figure(figsize=(4.0, 2.0), dpi=DPI)
    put_title(figure, title)
    return figure


def counted(calls):
    def draw(**values):
        calls.append(values)
        words = ", ".join(f"{name} {value}" for name, value in values.items())
        return Picture(picture(words), f"It shows {words}.")

    return draw


def test_a_control_set_in_code_redraws_before_the_assignment_returns():
    def draw(ranks):
        return draw_timeline(data_parallel(ranks))

    panel = Panel(draw, ranks=ipywidgets.IntSlider(2, min=1, max=4))
    before, figure = panel.png, panel.figure
    assert panel.text.startswith("Timeline of 2 ranks")
    panel.controls["ranks"].value = 3
    assert panel.text.startswith("Timeline of 3 ranks")
    assert panel.png.startswith(b"\x89PNG")
    assert panel.png != before
    assert panel.figure is not figure


def test_each_value_is_drawn_once_and_an_equal_one_not_again():
    calls = []
    panel = Panel(counted(calls), size=ipywidgets.IntSlider(1, min=0, max=9), mode=ipywidgets.Dropdown(options="ab"))
    panel.controls["size"].value = 4
    panel.controls["size"].value = 4
    panel.controls["mode"].value = "b"
    assert calls == [{"size": 1, "mode": "a"}, {"size": 4, "mode": "a"}, {"size": 4, "mode": "b"}]
    assert panel.num_drawn == 3


def test_moves_while_a_picture_is_drawn_give_one_more_picture_of_the_newest():
    calls = []

    def draw(size):
        calls.append(size)
        if size == 1:
            for value in (2, 3, 4):
                panel.controls["size"].value = value
        return Picture(picture(f"{size}"), f"size {size}")

    panel = Panel(draw, size=ipywidgets.IntSlider(0, min=0, max=9))
    panel.controls["size"].value = 1
    assert calls == [0, 1, 4]
    assert panel.text == "size 4"


def test_an_error_is_one_line_and_the_next_value_draws_again():
    def draw(ranks):
        if ranks == 3:
            raise ValueError("12 layers cannot fill 3 stages;\n  use 2 or 4")
        return Picture(picture(f"{ranks} ranks"), f"{ranks} ranks")

    panel = Panel(draw, ranks=ipywidgets.IntSlider(2, min=1, max=4))
    panel.controls["ranks"].value = 3
    assert panel.text == "No picture for ranks = 3: ValueError: 12 layers cannot fill 3 stages; use 2 or 4"
    assert isinstance(panel.error, ValueError)
    assert panel.png == b""
    data, _ = panel._repr_mimebundle_()
    assert "12 layers" in data["text/plain"]
    assert "image/png" not in data
    panel.controls["ranks"].value = 4
    assert (panel.text, panel.error) == ("4 ranks", None)
    assert panel.png


def test_a_reader_without_a_kernel_gets_picture_text_and_alt_text():
    panel = Panel(counted([]), size=ipywidgets.IntSlider(1, min=0, max=9))
    data, metadata = panel._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert base64.b64decode(data["image/png"]) == panel.png
    assert data["text/plain"] == panel.text == "It shows size 1."
    assert metadata["image/png"]["alt"] == "size 1"


def test_the_same_values_give_the_same_bytes():
    first, again = (Panel(counted([]), size=ipywidgets.IntSlider(1, min=0, max=9)) for _ in range(2))
    assert first.png == again.png


def test_controls_are_named_after_their_keyword_unless_they_have_a_description():
    size, mode = ipywidgets.IntSlider(1, min=0, max=9), ipywidgets.Dropdown(options="ab", description="which one")
    Panel(counted([]), num_bytes=size, mode=mode)
    assert (size.description, mode.description) == ("num bytes", "which one")


def test_play_becomes_buttons_beside_a_slider_with_its_limits():
    calls = []
    play = ipywidgets.Play(2, min=1, max=6, step=1, interval=400)
    panel = Panel(counted(calls), step=play)
    slider = panel.controls["step"]
    assert isinstance(slider, ipywidgets.IntSlider)
    assert (slider.value, slider.min, slider.max) == (2, 1, 6)
    slider.value = 5
    assert calls == [{"step": 2}, {"step": 5}]
    shown = panel.children[0].children[0]
    assert play in shown.children
    assert slider in shown.children


@pytest.mark.parametrize("control", [4, (1, 8), ipywidgets.VBox()])
def test_a_control_without_a_value_is_refused_by_name(control):
    with pytest.raises(TypeError, match="control 'ranks' is .* pass an ipywidgets control such as IntSlider"):
        Panel(counted([]), ranks=control)


def test_a_panel_without_controls_is_a_picture():
    assert Panel(lambda: Picture(picture("one"), "just one")).text == "just one"


def test_the_face_has_every_name_that_it_promises():
    import simulator.viz

    assert all(callable(getattr(simulator.viz, name)) for name in public_names("simulator.viz"))
    with pytest.raises(AttributeError, match="module 'simulator.viz' has no attribute 'no_panel'"):
        _ = simulator.viz.no_panel
