"""Checks that name the fault: run a learner's function on real ranks and say in words what is wrong with it.

Start at `check.check`. Names load on first use, so that importing the package loads neither torch nor a lesson.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from distlab.grading.check import check  # first, or the name would come to mean the submodule of the same name
from distlab.grading.exercise import Evidence, Exercise, Fault, NotYet
from distlab.grading.mutant import Mutant

if TYPE_CHECKING:
    from distlab.grading.lesson import Lesson, lessons, load_lesson, reference_of
    from distlab.grading.report import Report
    from distlab.grading.submission import load_submission

_HOMES = {
    "Lesson": "lesson",
    "Report": "report",
    "lessons": "lesson",
    "load_lesson": "lesson",
    "load_submission": "submission",
    "reference_of": "lesson",
}
__all__ = [
    "Evidence",
    "Exercise",
    "Fault",
    "Lesson",
    "Mutant",
    "NotYet",
    "Report",
    "check",
    "lessons",
    "load_lesson",
    "load_submission",
    "reference_of",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"distlab.grading.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'distlab.grading' has no attribute {name!r}")
