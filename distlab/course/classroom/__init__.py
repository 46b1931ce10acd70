"""For instructors: student copies of the lessons, and the grades of a whole class.

Read in this order:

1. `release`: what a student gets.
2. `submissions`: what students hand in.
3. `run`: all of it checked side by side, each submission in a process or a container of its own, under limits.
4. `grades`: points, kept as files and shown as tables.
"""

from distlab.course.classroom.grades import Grade as Grade, write_tables as write_tables
from distlab.course.classroom.release import release as release
from distlab.course.classroom.run import grade_all as grade_all, refuse_unless_contained as refuse_unless_contained
from distlab.course.classroom.submissions import Submission as Submission, find_submissions as find_submissions
