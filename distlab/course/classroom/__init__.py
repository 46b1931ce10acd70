"""For instructors: `release` writes what a student gets; `grade` takes what is handed in."""

from distlab.course.classroom.grade import (
    Submission as Submission,
    find_submissions as find_submissions,
    grade_all as grade_all,
    refuse_unless_contained as refuse_unless_contained,
    write_tables as write_tables,
)
from distlab.course.classroom.release import release as release
