"""Checks that name the fault: run a learner's function on real ranks and say in words what is wrong with it.

Start at `check.check`. Importing the package loads neither torch nor a lesson.
"""

from distlab.grading.check import check  # first, or the name would come to mean the submodule of the same name
from distlab.grading.exercise import Evidence, Exercise, Fault, NotYet
from distlab.grading.lesson import Lesson, lessons, load_lesson, reference_of
from distlab.grading.mutant import Mutant
from distlab.grading.report import Report
from distlab.grading.submission import load_submission

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
