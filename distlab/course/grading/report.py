"""What a check says: as text, as HTML in a notebook, and as plain data for programs."""

from __future__ import annotations

import html
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from distlab.course.grading.exercise import Exercise
from distlab.course.grading.lesson import source_text
from distlab.faces import version

SCHEMA = 1
_HEADS = {"passed": "Correct.", "not attempted": "Not yet attempted.", "wrong": "Wrong:", "blocked": "Blocked:"}
_COLOURS = {"passed": "#1b7837", "not attempted": "#555555", "wrong": "#a50026", "blocked": "#8a5a00"}


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        exercise: what was checked.
        verdict: "passed", "wrong", "not attempted", or "blocked" where this machine cannot run it.
        fault: the code of the fault, or None.
        message: the fault in words, "" when it passed.
        budget: what a right answer used.
        worlds: numbers of ranks on which it was right.
        seconds: how long the check took.
        answer: the learner's function, or None where there was none.
        reference: the exercise's own.
        progress: one line on whether the result was kept.
    """

    exercise: Exercise
    verdict: str
    fault: str | None
    message: str
    budget: tuple[str, ...]
    worlds: tuple[int, ...]
    seconds: float
    answer: Callable[..., Any] | None
    reference: Callable[..., Any]
    progress: str = ""
    _shown: list[bool] = field(default_factory=list, repr=False, compare=False)

    @property
    def passed(self) -> bool:
        """Whether the answer is right."""
        return self.verdict == "passed"

    @property
    def function(self) -> Callable[..., Any]:
        """The learner's function if it passed, else the reference, so that what follows works either way."""
        return self.answer if self.passed and self.answer is not None else self.reference

    def __str__(self) -> str:
        head = _HEADS[self.verdict]
        if self.passed:
            ranks = ", ".join(map(str, self.worlds))
            on = "" if self.worlds == (1,) else f" Right on {ranks} ranks."
            lines = [f"{head} {self.exercise.name}: {self.exercise.title}.{on}", *(f"  {line}" for line in self.budget)]
        else:
            lines = [f"{head} {self.message}"]
        return "\n".join([*lines, *([self.progress] if self.progress else [])])

    def as_dict(self) -> dict[str, Any]:
        """Return the report as data that JSON holds."""
        torch = getattr(sys.modules.get("torch"), "__version__", None)
        return {
            "schema": SCHEMA,
            "exercise": self.exercise.name,
            "verdict": self.verdict,
            "fault": self.fault,
            "message": self.message,
            "budget": list(self.budget),
            "worlds": list(self.worlds),
            "seconds": round(self.seconds, 3),
            "versions": {"distlab": version(), "python": platform.python_version(), "torch": torch},
        }

    def show(self) -> None:
        """Display the report where a notebook is running; elsewhere do nothing."""
        shell = sys.modules.get("IPython")
        if shell is not None and shell.get_ipython() is not None:
            self._ipython_display_()

    def _ipython_display_(self) -> None:
        """Display once, though a cell may both run the check and end with it."""
        if self._shown:
            return
        from IPython.display import display

        self._shown.append(True)
        display(self._repr_mimebundle_(), raw=True)  # type: ignore[no-untyped-call]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._html()}

    def _html(self) -> str:
        head, *rest = str(replace(self, progress="")).splitlines()
        word, text = _HEADS[self.verdict], head.removeprefix(_HEADS[self.verdict]).strip()
        body = "".join(f"<div>{html.escape(line)}</div>" for line in rest)
        body = f'<div style="white-space:pre-wrap;font-family:monospace">{body}</div>' if body else ""
        foot = f'<div style="opacity:0.75">{html.escape(self.progress)}</div>' if self.progress else ""
        style = f"border-left:4px solid {_COLOURS[self.verdict]};padding:4px 12px"
        first = f"<div><strong>{html.escape(word)}</strong> {html.escape(text)}</div>"
        return f'<div role="status" aria-live="polite" style="{style}">{first}{body}{self._beside()}{foot}</div>'

    def _beside(self) -> str:
        if not self.passed or self.answer is None:
            return ""
        mine, theirs = (html.escape(source_text(fn)) for fn in (self.answer, self.reference))
        if not mine or not theirs:
            return ""
        cell = "vertical-align:top;text-align:left;padding:4px 12px"
        code = "white-space:pre;overflow-x:auto"  # a line that is too long scrolls; it does not break inside a word
        columns = "".join(f'<td style="{cell}"><pre style="{code}">{text}</pre></td>' for text in (mine, theirs))
        heads = "".join(f'<th scope="col" style="{cell}">{text}</th>' for text in ("Yours", "The reference"))
        return (
            "<details><summary>Your code and the reference</summary>"
            f'<table style="table-layout:fixed;width:100%"><tr>{heads}</tr><tr>{columns}</tr></table></details>'
        )
