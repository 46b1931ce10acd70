"""Checks that name the fault: run a learner's function on real ranks and say in words what is wrong with it.

Start at `check.check`. It runs an answer on fresh ranks (`run`), under limits (`guard`), and returns a `report`. An
`exercise` says how an answer is driven and judged: by `cases`, on which the known wrong version that agrees names the
fault (`agreement`). A `lesson` is loaded by path, and its wrong versions are `mutant`s. Rooms: `answer` (where it
stands), `variation` (drawn arguments), `causes` (where it is wrong), `diagnosis` (its fault, in words).
`progress` keeps what was passed; `sealed` packs a lesson's checks for a student copy.
Importing the package loads neither torch nor a lesson.
"""

from distlab.grading.answer.submission import load_submission
from distlab.grading.check import check  # the function, not the submodule
from distlab.grading.exercise import Evidence, Exercise, Fault, NotYet
from distlab.grading.lesson import Lesson, lessons, load_lesson, reference_of
from distlab.grading.mutant import Mutant
from distlab.grading.report import Report

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
