"""Say where the ranks of running jobs stand, who waits for whom, and what is wrong; nothing is stopped or disturbed.

For jobs of `run`, of labs, of notebooks and of torchrun, also those that distlab did not start. Stacks come from py-spy
(pip install 'distlab[labs]'); ranks of distlab also answer without it. Calls come from distlab's recorder; with
--dumps torch's own analyzer reads the files that its flight recorder has left (TORCH_FR_DUMP_TEMP_FILE).
"""

from __future__ import annotations

import argparse

from distlab.comm.where.find import find_jobs
from distlab.comm.where.flight import analyzed, read_dumps
from distlab.comm.where.say import report


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the arguments of `distlab where`."""
    command.add_argument("pid", nargs="?", type=int, help="process number of a launcher or of a rank; else all jobs")
    command.add_argument("--short", action="store_true", help="leave the stacks out")
    command.add_argument(
        "--dumps", metavar="PREFIX", help="analyze what torch's flight recorder left as PREFIX0, PREFIX1, ..."
    )


def main(arguments: argparse.Namespace) -> int:
    """Print where each rank stands; exit 1 where no job runs."""
    if arguments.dumps is not None:
        if arguments.pid is not None:
            raise ValueError("pass a process number or --dumps, not both")
        print(analyzed(read_dumps(arguments.dumps)))
        return 0
    jobs = find_jobs(arguments.pid)
    if not jobs:
        print("no job of yours has ranks on this machine")
        return 1
    for number, job in enumerate(jobs):
        print("\n" * bool(number) + "\n".join(report(job, with_stacks=not arguments.short)), flush=True)
    return 0
