"""Commands of the course, for learners and for those who teach it.

Read `lesson` (working copies), `check` (answers on real ranks), `lab` (the same on real data), `capstone` (a plan of
your own through a kill); then `release` (student copies) and `grade` (what a class handed in).
"""
