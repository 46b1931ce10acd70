"""A Panel: controls, the picture they draw, and a line of text that says the same.

The picture is an ordinary matplotlib Figure, drawn in the kernel and shown as an image. So whatever can be drawn can be
moved by a slider, and a reader without a kernel still sees the last picture and reads its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets
from matplotlib.figure import Figure

from simulator.viz.drawing.paint import to_png
from simulator.viz.drawing.pen import NAMES, Picture, title_of, with_picture

Draw = Callable[..., Picture]
CONTROL_WIDTH, WORDS_WIDTH = "27em", "12.5em"  # the tracks of all sliders begin at one place
SCRIPTS = (NAMES, Path(__file__).with_name("panel.js"))  # one module: the second uses what the first defines
FEW = 4  # controls that stand above a picture; more stand between it and its words, so that a low screen shows both


class Shown(anywidget.AnyWidget):
    """An image with alt text, and a line of text under it that screen readers announce when it changes."""

    _esm = "\n".join(path.read_text("utf-8") for path in SCRIPTS)
    png = traitlets.Bytes(b"").tag(sync=True)
    title = traitlets.Unicode("").tag(sync=True)
    text = traitlets.Unicode("").tag(sync=True)
    failed = traitlets.Bool(False).tag(sync=True)


class Redrawn(ipywidgets.VBox):
    """Controls over something that `_draw_once` draws anew whenever one of them moves."""

    _drawing = _stale = False
    controls: dict[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """What the controls are set to, by name, without a clock."""
        return {name: control.value for name, control in self.controls.items() if name != "moment"}

    def redraw(self, _change: object = None) -> None:
        """Draw for the controls' values of this moment.

        A control that moves during a drawing has it repeated right after, for the newest values only.
        """
        self._stale = True
        if self._drawing:
            return
        self._drawing = True
        try:
            while self._stale:
                self._stale = False
                self._draw_once()
        finally:
            self._drawing = False

    def _draw_once(self) -> None:
        raise NotImplementedError


class Panel(Redrawn):
    """Controls over a picture: `draw` is called with the controls' values and returns a Picture.

    A control is any ipywidgets widget that has a value; its name is the keyword that `draw` gets. A Play control
    becomes play buttons next to a slider, and the slider is the control. Set `panel.controls["name"].value` to move a
    control in code: the picture is drawn before the assignment returns.

    Where `draw` raises, the panel shows the error as one line in place of the picture and works on; `error` holds it.

    Attributes:
        controls: the controls by name.
        figure: the last Figure that was drawn, or None.
        text: the text of the last picture, or of the error.
        png: the last picture, empty after an error.
        error: what `draw` raised last time, or None.

    Raises:
        TypeError: a control is not a widget with a value.
    """

    def __init__(self, draw: Draw, **controls: Any) -> None:
        self._draw = draw
        self.controls = {}
        self.figure: Figure | None = None
        self.error: Exception | None = None
        self._picture = Shown()
        shown = [self._adopt(name, control) for name, control in controls.items()]
        parts = [row_of(shown), self._picture] if shown else [self._picture]
        super().__init__(parts if len(shown) <= FEW else parts[::-1])
        self.redraw()

    @property
    def text(self) -> str:
        """The line under the picture."""
        return str(self._picture.text)

    @property
    def png(self) -> bytes:
        """The picture as it is shown."""
        return bytes(self._picture.png)

    def _draw_once(self) -> None:
        try:
            figure, text = self._draw(**self.values)
            png, title, failed = to_png(figure), title_of(figure), False
            self.figure, self.error = figure, None
        except Exception as error:  # whatever it raises is shown where the picture was
            said = " ".join(str(error).split())
            settings = ", ".join(f"{name} = {value!r}" for name, value in self.values.items())
            text = f"No picture for {settings or 'these values'}: {type(error).__name__}{': ' if said else ''}{said}"
            png, title, failed, self.error = b"", "", True, error
        with self._picture.hold_sync():
            self._picture.png, self._picture.title = png, title or text
            self._picture.text, self._picture.failed = text, failed

    def _adopt(self, name: str, control: Any) -> Any:
        """Take a control in and return what to show."""
        if not (isinstance(control, ipywidgets.Widget) and control.has_trait("value")):
            example = "an ipywidgets control such as IntSlider(4, min=1, max=8)"
            raise TypeError(f"control {name!r} is {control!r}, which has no value to read; pass {example}")
        shown = control
        if isinstance(control, ipywidgets.Play):
            limits = {"min": control.min, "max": control.max, "step": control.step, "value": control.value}
            slider = ipywidgets.IntSlider(description=control.description, **limits)
            link = ipywidgets.jslink((control, "value"), (slider, "value"))
            shown = ipywidgets.HBox([control, slider])
            control, self._links = slider, [*getattr(self, "_links", []), link]
        self.controls[name] = dress(name, control)
        control.observe(self.redraw, "value")
        return shown

    def _repr_mimebundle_(self, **_options: object) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the widget, and also the picture and its text for readers without a kernel."""
        return with_picture(super()._repr_mimebundle_(), self.png, title=self._picture.title, words=self.text)


def dress(name: str, control: Any) -> Any:
    """Give a control a description, where it has none, room for it, and a width; return it."""
    if control.has_trait("description") and not control.description:
        control.description = name.replace("_", " ")
    if control.has_trait("style") and hasattr(control.style, "description_width"):
        control.style.description_width = WORDS_WIDTH if "Slider" in type(control).__name__ else "initial"
    if control.layout.width is None and not isinstance(control, ipywidgets.Checkbox | ipywidgets.ToggleButton):
        control.layout.width = CONTROL_WIDTH
    return control


def slider(words: str, value: float, least: float, most: float, step: float, **look: Any) -> Any:
    """Return a slider of numbers, named by the words."""
    return ipywidgets.FloatSlider(value=value, min=least, max=most, step=step, description=words, **look)


def choice(words: str, options: Iterable[Any], value: Any = None, *, is_slider: bool = False) -> Any:
    """Return a drop-down, or a slider, of options (or pairs of a label and an option), named by the words."""
    listed = list(options)
    first = listed[0][1] if isinstance(listed[0], tuple) else listed[0]
    kind = ipywidgets.SelectionSlider if is_slider else ipywidgets.Dropdown
    return kind(options=listed, value=first if value is None else value, description=words)


def logarithmic(words: str, first: float, least: int, most: int, say: Callable[[float], str]) -> Any:
    """Return a slider of 1, 2 and 5 times each power of ten, from the least to the most, and of where it begins."""
    values = {digit * 10.0**power for power in range(least, most) for digit in (1, 2, 5)} | {10.0**most, first}
    return choice(words, [(say(value), value) for value in sorted(values)], first, is_slider=True)


def row_of(controls: Iterable[Any]) -> Any:
    """Put controls side by side, and more under them where a page is narrow."""
    return ipywidgets.HBox(list(controls), layout={"flex_flow": "row wrap", "grid_gap": "0 24px"})
