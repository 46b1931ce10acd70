"""For instructors: student copies of the lessons, and the grades of a whole class.

Read in this order:

1. `release`: what a student gets.
2. `submissions`: what students hand in.
3. `one`: one submission, checked in a process of its own.
4. `run`: many of them, side by side, under limits.
5. `contained`: the same in a container.
6. `marks`: points.
7. `page`: tables to read.
"""

from distlab.classroom.marks import Grade as Grade
from distlab.classroom.release import release as release
from distlab.classroom.run import Limits as Limits, grade_all as grade_all
from distlab.classroom.submissions import Submission as Submission, find_submissions as find_submissions
