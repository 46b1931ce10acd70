"""Watch the ranks of a job, and end one that cannot go on, with words.

Read `watchdog`: who waits for whom, from the records of all ranks. In `watch` the ranks of a machine watch each other
from inside.
"""
