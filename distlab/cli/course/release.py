"""Write a student copy of the lessons: without solutions, with sealed checks, and with hidden cases for the grading.

What a student hands in from it is graded with `distlab grade`, from the instructor's own checkout.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab release`."""
    command.add_argument("folder", type=Path, metavar="DIR", help="where to write the copy: a new folder")
    command.add_argument("--lessons", nargs="+", default=(), metavar="NN", help="numbers of lessons; default: all")
    command.add_argument("--title", default="distlab", help="the first line of its README")


def main(arguments: argparse.Namespace) -> int:
    """Write the copy, and say what is in it.

    Raises:
        ValueError: the folder holds something already, or there is no such lesson.
    """
    from distlab.course.classroom import release
    from distlab.course.grading.lesson import lessons_folder

    copies = release(lessons_folder(), arguments.folder, arguments.lessons, title=arguments.title)
    print(f"{arguments.folder}: {len(copies)} lessons, README.md")
    print("Solutions and checks are sealed, drawn cases are left out; `distlab grade` checks with all of them.")
    return 0
