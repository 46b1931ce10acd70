"""Say where the ranks of a job stand, from outside: nothing is stopped, changed or ended.

Read in this order:

1. `find`: which processes are the ranks of a job.
2. `stacks`: where each stands, by py-spy or by the rank's own answer to a signal, which `answer` prepares.
3. `flight`: the dumps of torch's flight recorder.
4. `frames`: whose a line is, and the stacks that ranks write themselves.
5. `say`: who waits for whom, and one sentence that says what is wrong.
"""
