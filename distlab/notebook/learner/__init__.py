"""What a learner has and did.

Read `course` (the map of lessons), `copies` (working copies that are never overwritten), `prediction` (a number given
before a run), `stuck` (hints, solutions, saved answers) and `page` (all that was passed, to print).
"""
