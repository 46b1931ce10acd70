"""Watch the ranks of a job, and end one that cannot go on, with words.

Read `waits`: who waits for whom, and whether ranks can go on after an error. `watchdog` looks for that in all
records who waits for whom. In `watch` the ranks of a machine watch each other from inside.
"""
