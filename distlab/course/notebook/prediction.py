"""A number that you commit to before a run, to compare with what is measured, or simulated.

In the folder of your working copies, what answers a question stays closed until then. Only a number that you gave
before you saw the answer is yours, and only that is kept, in the file of your progress, beside what came true.
"""

from __future__ import annotations

import functools
import html
import sys
from collections.abc import Callable
from typing import Any

from distlab.course.grading.progress import closes, keep_measured, keep_prediction, record_of
from distlab.course.notebook.ranks import CellError

CLOSED = "distlab-closed"  # an output that shows a box of this class shows nothing else, but for errors
STYLE = f"<style>.jp-OutputArea:has(.{CLOSED})>:not(:has(.{CLOSED},[data-mime-type*=err])){{display:none}}</style>"


class Prediction:
    """One question, one number; a box to type into where a notebook shows it, `commit` in code.

    Attributes:
        question: what is asked.
        unit: of the number.
        signed: whether the answer may be negative.
        value: the number that you gave, now or in an earlier run, or None.
        shown: whether you have seen what came true; a number that comes later does not count.
    """

    def __init__(self, question: str, unit: str = "", *, signed: bool = False) -> None:
        self.question, self.unit, self.signed = question, unit, signed
        self.key = f"{question} ({unit})" if unit else question  # its name in the file of progress
        record = record_of()
        earlier, self.shown = record.predictions.get(self.key), self.key in record.measured
        self.value = None if earlier is None or self._refusal(earlier) else earlier
        self._cell, self._places = -1, list[Any]()  # the last closed one, by its number, and where it shows the box
        self._later: Callable[[], str] | None = None  # compares, once that may be seen
        self._compared = ""
        self._box: Any = None

    @property
    def closed(self) -> bool:
        """Whether what answers the question is not to be seen yet."""
        return self.value is None and not self.shown and closes()

    def lock(self) -> bool:
        """Close what this cell shows until you commit to a number or press "Show me"; return whether it is closed."""
        from IPython import display, get_ipython

        number = 0 if (shell := get_ipython()) is None else shell.execution_count
        if self.closed and number != self._cell:
            self._cell = number
            self._places += [display.display(self, display_id=True)] if shell else []  # type: ignore[no-untyped-call]
        return self.closed

    def commit(self, value: float) -> str:
        """Commit to a number in code and keep it; return what is known now. What is closed opens.

        Raises:
            CellError: it is not a finite number, or it is negative where that cannot be.
        """
        if refusal := self._refusal(value):
            raise CellError(f"a prediction is {refusal}; got {value!r}")
        if self.shown:
            return f"{self!r} (you have seen the answer: a number that comes later does not count)"
        self.value = float(value)
        told = keep_prediction(self.key, self.value)
        self._open()
        return f"{self!r} ({told})" if told else repr(self)

    def show_me(self) -> str:
        """Open what is closed without a number of yours, of which none is kept; return what is known now."""
        self.shown = True
        self._open()
        return repr(self)

    def compare(self, measured: float, *, how: str = "measured") -> str:
        """Compare the prediction with the number, in words; `how` says where that comes from: "simulated".

        Without a prediction the cell is closed, as by `lock`, and the words stand beside the box when it opens.
        """
        if self.lock():
            self._later = functools.partial(self.compare, measured, how=how)
            return "Your prediction stands above." if self._places else repr(self)
        if self.value is not None or self.shown:
            self.shown = True
            keep_measured(self.key, float(measured))
        result = f"{how} {self._number(measured)}"
        if self.value is None:
            return f"{result}. You gave no number."
        words = f"you predicted {self._number(self.value)}, {result}"
        if self.value == measured:
            return f"{words}: exactly"
        if measured == 0 or self.value == 0 or (measured < 0) != (self.value < 0):
            return f"{words}: off by {self._number(abs(self.value - measured))}"
        ratio = self.value / measured
        if 0.9 <= ratio <= 1.1:
            return f"{words}: within {abs(ratio - 1):.0%}"
        times, which = (ratio, "too much") if ratio > 1 else (measured / self.value, "too little")
        return f"{words}: {times:,.0f}x {which}" if times >= 100 else f"{words}: {times:.2g}x {which}"

    def __repr__(self) -> str:
        if self.closed and self._cell >= 0:
            words = "closed until you commit to a number or press Show me; in code: .commit(3.2) or .show_me()"
            return f"Predict first: {self.question} ({words})"
        none = "shown without a number" if self.shown else "not answered yet"
        said = self._compared or (none if self.value is None else self._number(self.value))
        return f"Predict: {self.question} ({said})"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        self._box = self._box or self._make_box()
        self._tell()
        return {**self._box._repr_mimebundle_(), "text/plain": repr(self)}

    def _open(self) -> None:
        self._compared = "" if self._later is None else self._later()
        self._tell()
        for place in self._places:
            place.update(self)  # a notebook that is saved has these words

    def _tell(self, words: str = "") -> None:
        """Say beside the box how things stand, or these words about what was typed."""
        if self._box is not None:
            said, row, _ = self._box.children
            if self.value is not None:
                row.children[0].value = repr(self.value).removesuffix(".0")  # reading it gives the same number
            row.layout.display = "none" if self.shown else None
            said.value = html.escape(words or repr(self))
            (self._box.add_class if self.closed else self._box.remove_class)(CLOSED)

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

    def _make_box(self) -> Any:
        from ipywidgets import HTML, Button, HBox, Label, Layout, Text, VBox

        box = Text(placeholder="your number", continuous_update=False, layout=Layout(width="9em"))
        box.tooltip = self.question
        commit = Button(description="Commit", tooltip="Fix this number as your prediction", layout=Layout(width="7em"))
        show = Button(description="Show me", tooltip="See it without a number of yours", layout=Layout(width="7em"))

        box.observe(lambda _: self._typed(box.value), names="value")  # Enter, or leaving the box
        commit.on_click(lambda _: self._typed(box.value))
        show.on_click(lambda _: self.show_me())
        return VBox([HTML(), HBox([box, Label(self.unit), commit, show]), HTML(STYLE)])

    def _typed(self, text: str) -> None:
        """Commit to what was typed, and say beside the box what became of it."""
        text, fault = text.strip(), "Type a number first."
        try:
            if (number := float(text.removesuffix(self.unit))) == self.value:  # this program wrote it there
                return
            refusal = self._refusal(number)
            fault = f"{text!r} cannot be the answer: write {refusal}" if refusal else ""
        except ValueError:
            fault = f"{text!r} is not a number; write one such as 3.2 or 1000" if text else fault
        self._tell(f"Predict: {self.question} ({fault})" if fault else self.commit(number))


@functools.cache
def predict(question: str, unit: str = "", *, signed: bool = False) -> Prediction:
    """Ask for a number before a run; the same question again is the same Prediction.

    The notebook shows a box to type it into, with the number that you gave earlier; `.commit(3.2)` does the same in
    code. `.compare(measured)` says how near it was. In the folder of your working copies a cell that calls it, or
    `.lock()`, stays closed until you commit, or `.show_me()` opens it without a number; all cells run all the same.
    A negative number is refused, unless the question is `signed`.
    """
    return Prediction(question, unit, signed=signed)
