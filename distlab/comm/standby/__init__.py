"""Ranks of torchrun that start at once: forked from a process which has torch loaded.

    torchrun --nproc-per-node 4 --max-restarts 100 -m distlab.comm.standby train.py ARGUMENTS

torchrun starts each rank as a new Python, which loads torch anew: three seconds of a core per rank, after each death.
Here that new Python loads nothing and asks a process that stands by. The first to ask starts it; it loads torch once,
forks every rank, and ends with torchrun. The script is read anew at each start. This works on Linux and macOS. The
script may use a GPU; the process that stands by uses none, or it could not be forked.

Read `__main__` (what torchrun starts: it loads no torch) and `server` (the process that stands by).
"""
