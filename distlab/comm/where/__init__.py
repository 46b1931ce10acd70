"""Say where the ranks of a job stand, from outside: nothing is stopped, changed or ended.

Read `stacks` first: which processes are the ranks of a job, and where each stands, by py-spy or by its own answer to a
signal. `flight` reads dumps of torch's flight recorder, and `frames` says whose a line is. `say` tells who waits for
whom, and in one sentence what is wrong.
"""
