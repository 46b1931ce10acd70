"""Say where the ranks of a job stand, from outside: nothing is stopped, changed or ended.

Read `find` (which processes are the ranks of a job), `stacks` (where each stands, by py-spy or by the rank's own answer
to a signal), `flight` (dumps of torch's flight recorder), `frames` (whose a line is), and `say` (who waits for whom,
and one sentence that says what is wrong).
"""
