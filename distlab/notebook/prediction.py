"""A number that you commit to before a run, to compare with what is measured, or simulated."""

from __future__ import annotations

import html
import math
from typing import Any


class Prediction:
    """One question, one number; a box to type into where a notebook shows it, `commit` in code.

    Attributes:
        question: what is asked.
        unit: of the number.
        value: the number, or None while nothing has been committed.
    """

    def __init__(self, question: str, unit: str = "") -> None:
        self.question, self.unit = question, unit
        self.value: float | None = None
        self._box: Any = None

    def commit(self, value: float) -> str:
        """Commit to a number in code; return it in words.

        Raises:
            ValueError: it is not a finite number.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"a prediction is a finite number of {self.unit or 'something'}; got {value!r}")
        self.value = float(value)
        if self._box is not None and _number_in(self._box.value) != self.value:
            self._box.value = _text_of(self.value)
        return f"your prediction: {self._number(self.value)}"

    def default(self, value: float) -> None:
        """Commit to a number in code unless one has been committed: what was typed in the box stays."""
        if self.value is None:
            self.commit(value)

    def compare(self, measured: float, *, how: str = "measured") -> str:
        """Return a line that compares the prediction with the number; `how` says where that comes from: "simulated"."""
        result = f"{how} {self._number(measured)}"
        if self.value is None:
            return f"{result}; you predicted nothing (type a number above, or call .commit(3.0), before the run)"
        words = f"you predicted {self._number(self.value)}, {result}"
        if self.value == measured:
            return f"{words}: exactly"
        if measured == 0 or self.value == 0 or (measured < 0) != (self.value < 0):
            return f"{words}: off by {self._number(abs(self.value - measured))}"
        ratio = self.value / measured
        if 0.9 <= ratio <= 1.1:
            return f"{words}: within {abs(ratio - 1):.0%}"
        return f"{words}: {_times(ratio)} too much" if ratio > 1 else f"{words}: {_times(1 / ratio)} too little"

    def __repr__(self) -> str:
        answer = "not answered yet" if self.value is None else self._number(self.value)
        return f"Predict: {self.question} ({answer})"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": repr(self)}
        box = self._widget()
        return bundle if box is None else {**box._repr_mimebundle_(), **bundle}

    def _number(self, value: float) -> str:
        return f"{value:.4g} {self.unit}".rstrip()

    def _widget(self) -> Any:
        """Make the question with its box, or None where ipywidgets is missing."""
        try:
            from ipywidgets import HTML, Button, HBox, Label, Layout, Text, VBox
        except ModuleNotFoundError:
            return None
        said = HTML(html.escape(repr(self)))
        typed = "" if self.value is None else _text_of(self.value)
        self._box = box = Text(typed, placeholder="your number", continuous_update=False, layout=Layout(width="9em"))
        box.tooltip = self.question
        button = Button(description="Commit", tooltip="Fix this number as your prediction", layout=Layout(width="7em"))

        def take(_: object) -> None:
            if box.value.strip():
                said.value = html.escape(self._typed(box.value))

        box.observe(take, names="value")  # Enter, or leaving the box
        button.on_click(take)
        return VBox([said, HBox([box, Label(self.unit), button])])

    def _typed(self, text: str) -> str:
        """Commit to what was typed; return the text to show next to the box."""
        number = _number_in(text)
        if number is None or not math.isfinite(number):
            return f"Predict: {self.question} ({text.strip()!r} is not a number; write one such as 3.2)"
        self.commit(number)
        return repr(self)


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.2g}x"


def _text_of(value: float) -> str:
    """Write a number so that reading it gives the same one."""
    return repr(value).removesuffix(".0")


def _number_in(text: str) -> float | None:
    try:
        return float(text.strip().replace(",", "."))
    except ValueError:
        return None


def predict(question: str, unit: str = "") -> Prediction:
    """Ask for a number before a run.

    The notebook shows a box to type it into; `.commit(3.2)` does the same in code, `.default(3.2)` only where the box
    was left empty, and `.compare(measured)` says how near it was. Nothing waits for an answer: cells below run
    without one.
    """
    return Prediction(question, unit)
