"""What a learner has and did.

Read `course` (the map of lessons) and `copies` (working copies that are never overwritten). `prediction` asks for a
number before a run. `stuck` has hints, solutions and saved answers. `page` prints all that was passed.
"""
