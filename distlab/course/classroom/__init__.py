"""For instructors: `release` (what a student gets), `submissions` (handed in, what it earned), `run` (its checks)."""

from distlab.course.classroom.release import release as release
from distlab.course.classroom.run import grade_all as grade_all, refuse_unless_contained as refuse_unless_contained
from distlab.course.classroom.submissions import (
    Submission as Submission,
    find_submissions as find_submissions,
    write_tables as write_tables,
)
