"""Say where the ranks of a job stand, from outside: nothing is stopped, changed or ended.

Read `find` (which processes are the ranks of a job), `stacks` (where each stands: py-spy, or the rank's own answer to a
signal, which `answer` prepares), `flight` (the dumps of torch's flight recorder) and `say` (who waits for whom, and one
sentence that says what is wrong).
"""
