"""What `distlab.course.grading` has, at the place where learners import it."""

from distlab.course.grading import (
    Evidence as Evidence,
    Exercise as Exercise,
    Fault as Fault,
    Lesson as Lesson,
    Mutant as Mutant,
    NotYet as NotYet,
    Report as Report,
    check as check,
    lessons as lessons,
    load_lesson as load_lesson,
    load_submission as load_submission,
    reference_of as reference_of,
)
