"""Train by a plan of your own on two nodes, through a kill, against a budget of seconds and bytes.

`distlab capstone --new plan.toml` writes the plan to begin with. Change its [plan]; `distlab simulate plan.toml` says
what to expect. `distlab capstone plan.toml` runs it on 8 ranks of this machine, which make two nodes with a slow wire
between them; a rank is killed on the way. Exits with status 0 when all bars are kept, else 1.
"""

from __future__ import annotations

import argparse
import json
import secrets
from pathlib import Path

from distlab.cli.arguments import check_output
from distlab.comm.command import runnable


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab capstone`."""
    command.add_argument("file", nargs="?", type=Path, metavar="PLAN.toml", help="your plan")
    command.add_argument("--new", type=Path, metavar="PLAN.toml", help="write the plan to begin with, and end")
    command.add_argument(
        "--save-every", type=int, default=4, metavar="N", help="updates between two checkpoints: 1 to 24 (default 4)"
    )
    command.add_argument("--seed", type=int, metavar="N", help="of the kill (default: drawn, and printed)")
    command.add_argument("--name", default="you", metavar="NAME", help="yours, on the board")
    command.add_argument("--board", type=Path, metavar="FILE.csv", help="add the attempt to the class's table")
    command.add_argument("--json", action="store_true", help="print the verdict as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Write a first plan, show the board, or run a plan; return 0 when all bars are kept.

    Raises:
        ValueError: the file is not a plan for this task, or flags do not go together.
    """
    from distlab.course.capstone import FIRST_PLAN, add_row, attempt, read_board, read_entry, table

    if arguments.new is not None:
        with arguments.new.open("x", encoding="utf-8") as file:
            file.write(FIRST_PLAN)
        runs = runnable(f"distlab capstone {arguments.new}")
        print(f"wrote {arguments.new}: change its [plan], then {runs} trains by it")
        return 0
    if arguments.file is None:
        if arguments.board is None:
            raise ValueError("pass a plan file, or --new plan.toml to write one, or --board FILE.csv to see the table")
        print(table(read_board(arguments.board)))
        return 0
    entry = read_entry(arguments.file, arguments.save_every)
    if arguments.board is not None:
        check_output("--board", arguments.board)
        if arguments.board.exists():
            read_board(arguments.board)
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    if not arguments.json:
        print(f"{entry.text}\nTraining 24 updates on two nodes of four ranks, through a kill (--seed {seed}) ...")
    verdict = attempt(entry, seed)
    if arguments.json:
        print(json.dumps(verdict._asdict() | {"kept": verdict.is_kept}))
    else:
        for line, is_kept in verdict.lines():
            print(f"{'kept  ' if is_kept else 'MISSED'} {line}")
        print(f"Predicted for an update: {verdict.predicted:.2f} of the first plan's time, without the kill.")
    if arguments.board is not None:
        add_row(arguments.board, arguments.name, verdict)
        if not arguments.json:
            print(table(read_board(arguments.board)))
    return 0 if verdict.is_kept else 1
