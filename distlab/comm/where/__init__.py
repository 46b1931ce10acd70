"""Say where the ranks of a job stand, from outside: nothing is stopped, changed or ended.

Read `stacks` (which processes are the ranks of a job, and where each stands, by py-spy or by its own answer to a
signal), `flight` (dumps of torch's flight recorder), `frames` (whose a line is), and `say` (who waits for whom, and one
sentence that says what is wrong).
"""
