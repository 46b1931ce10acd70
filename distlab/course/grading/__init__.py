"""Checks that name the fault: run a learner's function on real ranks and say in words what is wrong with it.

Start at `check.check`. It runs an answer on fresh ranks (`run`), under limits (`guard`), and returns a `report`. An
`exercise` says how an answer is driven and judged: by `cases`, on which the known wrong version that agrees names the
fault (`agreement`). A `lesson` is loaded by path, and its wrong versions are `mutant`s. Rooms: `answer` (where it
stands), `variation` (drawn arguments), `causes` (where it is wrong), `diagnosis` (its fault, in words).
`progress` keeps what was passed; `sealed` packs a lesson's checks for a student copy.
Importing the package loads neither torch nor a lesson.
"""

from distlab.course.grading.answer.submission import load_submission as load_submission
from distlab.course.grading.check import check as check  # the function, not the submodule
from distlab.course.grading.exercise import Evidence as Evidence, Exercise as Exercise, Fault as Fault, NotYet as NotYet
from distlab.course.grading.lesson import (
    Lesson as Lesson,
    lessons as lessons,
    load_lesson as load_lesson,
    reference_of as reference_of,
)
from distlab.course.grading.mutant import Mutant as Mutant
from distlab.course.grading.report import Report as Report
