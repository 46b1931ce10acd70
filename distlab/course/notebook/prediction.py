"""A number that you commit to before a run, to compare with what is measured, or simulated.

Only a number that you gave counts as your answer, and only that is kept, in the file of your progress.
"""

from __future__ import annotations

import html
import sys
from typing import Any

from distlab.course.grading.progress import OUTSIDE, keep_prediction, prediction_of


class PredictionError(ValueError):
    """A number that cannot be the answer; a notebook shows its text alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Prediction:
    """One question, one number; a box to type into where a notebook shows it, `commit` in code.

    Attributes:
        question: what is asked.
        unit: of the number.
        signed: whether the answer may be negative.
        value: the number, given or assumed, or None while there is neither.
        given: whether you gave the number, now or in an earlier run; False where a lesson assumed it.
    """

    def __init__(self, question: str, unit: str = "", *, signed: bool = False) -> None:
        self.question, self.unit, self.signed = question, unit, signed
        self.value: float | None = None
        self._box: Any = None
        earlier = prediction_of(self._key)
        if earlier is not None and not self._refusal(earlier):
            self.value = earlier
        self.given = self.value is not None

    def commit(self, value: float) -> str:
        """Commit to a number in code and keep it; return it in words.

        Raises:
            PredictionError: it is not a finite number, or it is negative where that cannot be.
        """
        told = self._give(value)
        return f"your prediction: {self._number(value)}{told}"

    def default(self, value: float) -> None:
        """Assume a number where you gave none. It is not your answer: the box stays empty, and it is not kept.

        Raises:
            PredictionError: it is not a finite number, or it is negative where that cannot be.
        """
        if not self.given:
            self._set(value)

    @property
    def answer(self) -> str:
        """What you said, in a sentence; it says so where you gave no number."""
        if self.given and self.value is not None:
            return f"You said {self._number(self.value)}."
        assumed = "" if self.value is None else f"; {self._number(self.value)} was assumed"
        return f"You gave no number{assumed}."

    def compare(self, measured: float, *, how: str = "measured") -> str:
        """Compare the prediction with the number, in words; `how` says where that comes from: "simulated"."""
        result = f"{how} {self._number(measured)}"
        if self.value is None:
            return f"{result}; you predicted nothing\n(type a number above, or call .commit(3.0), before the run)"
        if not self.given:
            return f"{result}. {self.answer}"
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
        answer = self._number(self.value) if self.given and self.value is not None else "not answered yet"
        return f"Predict: {self.question} ({answer})"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return {**self._widget()._repr_mimebundle_(), "text/plain": repr(self)}

    @property
    def _key(self) -> str:
        """The question as the file of progress names it, with its unit."""
        return f"{self.question} ({self.unit})" if self.unit else self.question

    def _give(self, value: float) -> str:
        """Take a number as the learner's and keep it; return what must be told about that, in brackets, or ""."""
        self._set(value)
        self.given = True
        if self._box is not None:
            self._box.value = _text_of(float(value))
        told = keep_prediction(self._key, float(value))
        return "" if told in ("", OUTSIDE) else f" ({told})"

    def _set(self, value: float) -> None:
        if refusal := self._refusal(value):
            raise PredictionError(f"a prediction is {refusal}; got {value!r}")
        self.value = float(value)

    def _refusal(self, value: Any) -> str:
        """Return what a prediction must be where this value cannot be one, else ""."""
        what = self.unit or "something"
        most = float(self.unit[3:]) if self.unit.startswith("of ") else sys.float_info.max  # "of 60": 60 at most
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max:
            return f"a finite number of {what}"
        if value > most:
            return f"a number from 0 to {most:g}"
        return f"a number of {what} that is not negative" if value < 0 and not self.signed else ""

    def _number(self, value: float) -> str:
        return f"{value:.4g} {self.unit}".rstrip()

    def _widget(self) -> Any:
        """Make the question with its box."""
        from ipywidgets import HTML, Button, HBox, Label, Layout, Text, VBox

        said = HTML(html.escape(repr(self)))
        typed = _text_of(self.value) if self.given and self.value is not None else ""
        self._box = box = Text(typed, placeholder="your number", continuous_update=False, layout=Layout(width="9em"))
        box.tooltip = self.question
        button = Button(description="Commit", tooltip="Fix this number as your prediction", layout=Layout(width="7em"))

        def take(_: object) -> None:
            said.value = html.escape(self._typed(box.value))

        box.observe(take, names="value")  # Enter, or leaving the box
        button.on_click(take)
        return VBox([said, HBox([box, Label(self.unit), button])])

    def _typed(self, text: str) -> str:
        """Commit to what was typed; return the text to show next to the box."""
        if not text.strip():
            kept = f"; {self._number(self.value)} stays your answer" if self.given and self.value is not None else ""
            return f"Predict: {self.question} (Type a number first{kept}.)"
        try:
            number = float(text.strip().removesuffix(self.unit))
        except ValueError:
            return f"Predict: {self.question} ({text.strip()!r} is not a number; write one such as 3.2 or 1000)"
        if refusal := self._refusal(number):
            return f"Predict: {self.question} ({text.strip()!r} cannot be the answer: write {refusal})"
        told = self._give(number)
        return f"{self!r}{told}"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.2g}x"


def _text_of(value: float) -> str:
    """Write a number so that reading it gives the same one."""
    return repr(value).removesuffix(".0")


def predict(question: str, unit: str = "", *, signed: bool = False) -> Prediction:
    """Ask for a number before a run.

    The notebook shows an empty box to type it into, or the number that you gave to the same question earlier.
    `.commit(3.2)` does the same in code, `.default(3.2)` assumes a number where you gave none, and
    `.compare(measured)` says how near your number was. Nothing waits for an answer: cells below run without one.
    A negative number is refused, unless the question is `signed`.
    """
    return Prediction(question, unit, signed=signed)
