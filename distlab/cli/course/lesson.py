"""Open the lessons in JupyterLab, list them, print your progress, or bring a fresh copy of one.

You work in copies, in the folder work/; what you write there is never overwritten. `start` opens them on 127.0.0.1.
`list` shows what there is and how far you are. `page` writes that as an HTML page to print. `reset NN` puts your copy
of a lesson aside and brings a fresh one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

from distlab.cli.arguments import whole_number


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the actions of `distlab lesson` and their flags."""
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    start = actions.add_parser("start", help="open the lessons in JupyterLab")
    start.add_argument("--port", type=whole_number(most=65535), help="default: the first free one from 8888")
    start.add_argument("--no-browser", action="store_true", help="print the address and open no browser")
    listing = actions.add_parser("list", help="show the lessons and how far you are")
    page = actions.add_parser("page", help="write what you have passed as an HTML page, to print")
    reset = actions.add_parser("reset", help="put your copy of a lesson aside and bring a fresh one")
    reset.add_argument("lesson", metavar="NN", help="number of the lesson, such as 03, or START")
    for action in (start, listing, page, reset):
        action.add_argument("--work", type=Path, metavar="DIR", help="folder of your copies; default: work/")


def main(arguments: argparse.Namespace) -> int:
    """Do one action; exit 0 when it was done."""
    from distlab.course.grading.lesson import lessons_folder, work_beside
    from distlab.course.grading.progress import work_folder
    from distlab.course.notebook.learner.copies import reset
    from distlab.course.notebook.learner.course import text_table
    from distlab.course.notebook.learner.page import write_page

    lessons = lessons_folder()
    work = (arguments.work or work_folder() or work_beside(lessons)).expanduser().absolute()
    if arguments.action == "start":
        return _start(lessons, work, arguments.port, browser=not arguments.no_browser)
    if arguments.action == "list":
        print(text_table(lessons, work))
    elif arguments.action == "page":
        print(f"Your progress is in {_short(write_page(lessons, work))}: open it in a browser, and print it.")
    else:
        aside, fresh = reset(arguments.lesson, lessons, work)
        print(f"your copy is kept as {_short(aside)}\na fresh one is    {_short(fresh)}")
    return 0


def _start(lessons: Path, work: Path, port: int | None, *, browser: bool) -> int:
    if importlib.util.find_spec("jupyterlab") is None:
        raise ValueError("the lessons need JupyterLab; pip install 'distlab[notebooks]' brings it")
    from distlab.course.notebook.jupyter import serve
    from distlab.course.notebook.learner.copies import draw_map, make_copies

    copies = make_copies(lessons, work)
    made = [copy.name for copy in copies if copy.state == "made"]
    if made:
        print(f"new in {_short(work)}: {', '.join(made)}")
    for copy in copies:
        if copy.message:
            print(f"note: {copy.message}")
    draw_map(lessons, work)
    print("starting JupyterLab ...", flush=True)
    serve(work, port, browser=browser)
    return 0


def _short(path: Path) -> str:
    """Name a path as short as it can be from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
