"""Commands for learners, and for those who teach: `lesson`, `check`, `lab`, `capstone`; `release` and `grade`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from distlab.cli.command import NUM_RANKS, check_output, flag, flags, load_script, positive_number
from distlab.comm.command import runnable
from distlab.course.flags import Parser, number
from distlab.course.grading import Report, load_lesson
from distlab.course.grading.lesson import lesson_number, lessons_folder, work_beside
from distlab.course.grading.progress import MINE, keep, record_of, work_folder, working_copy

if TYPE_CHECKING:
    from distlab.course.lab import CommonSettings


@flag("lesson", metavar="NN", help="a lesson's number, such as 03, or an exercise, such as 03.flat")
@flag("--impl", metavar="MODULE|FILE", help="where answers are (default: mine, your working copy)")
@flag("--exercise", metavar="NAME", help="check one exercise, such as flat")
@flag("--seed", type=int, metavar="N", help="draw the arguments of an earlier check again")
@flag("--json", action="store_true", help="print the reports as JSON")
@flag("--list", action="store_true", help="list the exercises with minutes and difficulty; run none")
def check(arguments: argparse.Namespace) -> int:
    """Check the answers to a lesson, or to one exercise, on real ranks.

    Answers come from your working copy of the lesson's notebook, or from --impl: a module's name, the path of a .py
    file or a notebook, or "reference". Exits with status 0 when all are right, else 1.
    """
    from distlab.course.grading.answer.submission import isolated_submission
    from distlab.course.grading.check import examine
    from distlab.course.grading.report import SCHEMA

    lesson = load_lesson(arguments.lesson)
    exercises, asked = lesson.exercises, arguments.exercise or ("." in arguments.lesson and arguments.lesson)
    if asked:
        given, _, topic = asked.rpartition(".")
        if given and given.zfill(2) != lesson.number:
            raise ValueError(f"exercise {asked} is not of lesson {lesson.number}")
        exercises = (lesson.exercise(f"{lesson.number}.{topic}"),)
    if arguments.list:
        print("\n".join(f"{exercise.name}  {exercise.title} ({exercise.effort})" for exercise in exercises))
        return 0
    impl = str(working_copy(lesson.folder.name)) if arguments.impl in (None, MINE) else arguments.impl
    functions, notes = isolated_submission(impl, lesson)
    path = Path(impl).expanduser()
    if not arguments.json:
        saved = ""
        if path.suffix == ".ipynb" and path.is_file():  # later changes in the browser are not checked
            at = datetime.fromtimestamp(path.stat().st_mtime)
            saved = f", saved at {at:%H:%M:%S} (save again to check what you see now)"
        print("\n".join([f"Lesson {lesson.number}, {lesson.title}: answers of {impl}{saved}", *notes]), flush=True)
    start = path.resolve().parent if path.is_file() else Path.cwd()  # its folder keeps the progress
    reports: list[Report] = []
    told: list[str] = []
    for exercise in exercises:
        report = examine(exercise, functions[exercise.name], seed=arguments.seed)
        told += [keep(report, start)] if impl != "reference" else []
        again = bool(reports) and report.fault == "not loaded" and report.message == reports[0].message
        reports.append(report)
        if not arguments.json:
            print(f"\n{exercise.name}  {'Wrong, as above.' if again else report}", flush=True)
    passed = sum(report.passed for report in reports)
    if arguments.json:
        said = {"schema": SCHEMA, "lesson": lesson.number, "title": lesson.title, "impl": impl, "notes": [*notes]}
        said |= {"passed": passed, "total": len(reports), "reports": [report.as_dict() for report in reports]}
        print(json.dumps(said, indent=2))
    else:
        print("\n".join([f"\n{passed} of {len(reports)} exercises right.", *filter(None, dict.fromkeys(told))]))
    return 0 if passed == len(reports) else 1


def _actions(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    start = actions.add_parser("start", help="open the lessons in JupyterLab")
    start.add_argument("--port", type=number(least=1, most=65535), help="default: the first free one from 8888")
    start.add_argument("--no-browser", action="store_true", help="print the address and open no browser")
    listing = actions.add_parser("list", help="show the lessons and how far you are")
    page = actions.add_parser("page", help="write what you have passed as an HTML page, to print")
    reset = actions.add_parser("reset", help="put your copy of a lesson aside and bring a fresh one")
    reset.add_argument("lesson", metavar="NN", help="number of the lesson, such as 03, or START or GUIDES")
    for action in (start, listing, page, reset):
        action.add_argument("--work", type=Path, metavar="DIR", help="folder of your copies; default: work/")


@flags(_actions)
def lesson(arguments: argparse.Namespace) -> int:
    """Open the lessons in JupyterLab, list them, print your progress, or bring a fresh copy of one.

    You work in copies, in the folder work/; what you write there is never overwritten. `start` opens them on 127.0.0.1.
    `list` shows what there is and how far you are. `page` writes that as an HTML page to print. `reset NN` puts your
    copy of a lesson aside and brings a fresh one.
    """
    from distlab.course.notebook import course_map
    from distlab.course.notebook.course import reset, write_page

    lessons = lessons_folder()
    work = (arguments.work or work_folder() or work_beside(lessons)).expanduser().absolute()
    if arguments.action == "start":
        _start(lessons, work, arguments)
    elif arguments.action == "list":
        print(course_map(lessons, work))
    elif arguments.action == "page":
        print(f"Your progress is in {_short(write_page(lessons, work))}: open it in a browser, and print it.")
    else:
        aside, fresh = reset(arguments.lesson, lessons, work)
        print(f"your copy is kept as {_short(aside)}\na fresh one is    {_short(fresh)}")
    return 0


def _start(lessons: Path, work: Path, arguments: argparse.Namespace) -> None:
    if importlib.util.find_spec("jupyterlab") is None:
        raise ValueError("the lessons need JupyterLab; pip install 'distlab[notebooks]' brings it")
    from distlab.course.notebook.course import make_copies
    from distlab.course.notebook.jupyter import serve

    copies = make_copies(lessons, work)
    if made := [copy.name for copy in copies if copy.state == "made"]:
        print(f"new in {_short(work)}: {', '.join(made)}")
    for copy in copies:
        if copy.message:
            print(f"note: {copy.message}")
    print("starting JupyterLab ...", flush=True)
    serve(work, arguments.port, browser=not arguments.no_browser)


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


@flag("number", metavar="NN", help="which lesson's lab, such as 03")
@flag("flags", nargs=argparse.REMAINDER, metavar="...", help="--ranks N and the lab's own flags (see NN --help)")
def lab(arguments: argparse.Namespace) -> int:
    """Run a lesson's lab on ranks of this machine: measure, compare with the prediction and with the reference output.

    `distlab lab 03 --help` lists that lab's own flags. `--impl mine` runs your functions, those of your working copy,
    instead of the reference's. The plain torchrun command that does the same is printed first.
    """
    number, script = find_lab(arguments.number)
    num_ranks, settings, given = read_flags(number, script, arguments.flags)
    from distlab.comm.launch.fork_client import preload
    from distlab.comm.launch.ranks import run_script

    if not settings.json:
        words = ["torchrun", "--nproc-per-node", str(num_ranks), os.path.relpath(script), *given]
        print(f"{runnable(shlex.join(words))}\n", flush=True)

    def echo(rank: int, line: str) -> None:  # rank 0 tells the lab's story: its lines carry no rank
        is_result = rank == 0 and (not settings.json or line.startswith('{"schema"'))
        out = sys.stderr if settings.json and not is_result else sys.stdout
        print(line if is_result else f"[rank {rank}] {line}", file=out, flush=True)

    preload("distlab.course.lab")
    return run_script(script, num_ranks, given, echo=echo, limit_s=settings.limit_s)


def find_lab(name: str) -> tuple[str, Path]:
    """Return a lab's number and its script; a ValueError lists the labs that there are."""
    number = lesson_number(name)
    labs = {path.parent.name[:2]: path for path in sorted(lessons_folder().glob("[0-9][0-9]_*/lab.py"))}
    if number not in labs:
        raise ValueError(f"there is no lab {name}; labs are {', '.join(labs) or 'none yet'}")
    return number, labs[number]


def read_flags(number: str, script: Path, flags: list[str]) -> tuple[int, CommonSettings, list[str]]:
    """Read --ranks and the lab's own flags, and return the latter as given too; a mistake ends with exit status 2."""
    from distlab.comm import device
    from distlab.course.lab.settings import parser_of
    from distlab.measure import num_cores

    kind = load_settings(number, script)
    ranks, parser = Parser(add_help=False, allow_abbrev=False), parser_of(kind, f"distlab lab {number}")
    for each in (ranks, parser):
        each.add_argument("--ranks", type=NUM_RANKS, metavar="N", help="processes (default: one per GPU, else 4)")
    values = vars(parser.parse_args(flags))
    num_ranks = values.pop("ranks") or device.num_gpus() or min(4, 2 * num_cores())
    try:
        if values["impl"] == MINE:
            _tell_unpassed(number, working_copy(script.parent.name).parent)
        settings = kind(**values)
        _check(settings)
        settings.nodes_of(num_ranks)
        settings.check_ranks(num_ranks)
    except ValueError as error:
        parser.error(str(error))
    return num_ranks, settings, ranks.parse_known_args(flags)[1]


def load_settings(number: str, script: Path) -> type[CommonSettings]:
    """Load a lab's script without running it, and return the dataclass of its settings."""
    return load_script(f"distlab_lab_{number}", script).Settings  # type: ignore[no-any-return]


def _tell_unpassed(number: str, folder: Path) -> None:
    """Say which answers have not passed their checks: a lab that runs a wrong one prints wrong figures."""
    passed = {name for name, entry in record_of(folder).exercises.items() if entry.passed}
    if unpassed := [one.name for one in load_lesson(number).exercises if one.name not in passed]:
        text = f"not passed yet: {', '.join(unpassed)}. What the lab says with your version of these may be wrong"
        print(f"{text}: {runnable(f'distlab check {number}')} says what is wrong", file=sys.stderr, flush=True)


def _check(settings: CommonSettings) -> None:
    """Refuse, before any rank starts, files that are not there, a --trace that cannot be written, a missing GPU."""
    from distlab.measure import device_of

    for name, value in vars(settings).items():
        if isinstance(value, Path) and name != "trace" and not value.is_file():
            raise ValueError(f"--{name.replace('_', '-')} {value}: there is no such file; pass the path of a file")
    check_output("--trace", settings.trace, folder=True)
    if settings.device == "cuda":
        device_of("cuda", 0)


@flag("file", nargs="?", type=Path, metavar="PLAN.toml", help="your plan")
@flag("--new", type=Path, metavar="PLAN.toml", help="write the plan to begin with, and end")
@flag("--save-every", type=int, default=4, metavar="N", help="updates between two checkpoints: 1 to 24")
@flag("--seed", type=int, metavar="N", help="of the kill (default: drawn, and printed)")
@flag("--name", default="you", metavar="NAME", help="yours, on the board")
@flag("--board", type=Path, metavar="FILE.csv", help="add the attempt to the class's table")
@flag("--json", action="store_true", help="print the verdict as JSON")
def capstone(arguments: argparse.Namespace) -> int:
    """Train by a plan of your own on two nodes, through a kill, against a budget of seconds and bytes.

    `distlab capstone --new plan.toml` writes the plan to begin with. Change its [plan]; `distlab simulate plan.toml`
    says what to expect. `distlab capstone plan.toml` runs it on 8 ranks of this machine, which make two nodes with a
    slow wire between them; a rank is killed on the way. Exits with status 0 when all bars are kept, else 1.
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
    check_output("--board", arguments.board)
    if arguments.board is not None and arguments.board.exists():
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


@flag("folder", type=Path, metavar="DIR", help="where to write the copy: a new folder")
@flag("--lessons", nargs="+", metavar="NN", help="numbers of lessons; default: all")
@flag("--title", default="distlab", help="the first line of its README")
def release(arguments: argparse.Namespace) -> int:
    """Write a student copy of the lessons: without solutions, with sealed checks and hidden cases for the grading.

    What a student hands in from it is graded with `distlab grade`, from the instructor's own checkout.
    """
    from distlab.course.classroom import release

    copies = release(lessons_folder(), arguments.folder, arguments.lessons or (), title=arguments.title)
    print(f"{arguments.folder}: {len(copies)} lessons, README.md")
    print("Solutions and checks are sealed, drawn cases are left out; `distlab grade` checks with all of them.")
    return 0


@flag("lesson", metavar="NN", help="the lesson's number, such as 03")
@flag("submissions", nargs="+", type=Path, metavar="FILE|FOLDER", help="what was handed in")
@flag("--out", type=Path, default=Path("grades"), metavar="DIR", help="folder of results")
@flag("--jobs", type=number(least=1, most=64), default=1, metavar="N", help="submissions at a time")
@flag("--minutes", type=positive_number, default=10.0, metavar="M", help="limit of one submission")
@flag("--seed", type=int, metavar="N", help="of the drawn arguments; default: kept in DIR")
@flag("--contained", action="store_true", help="each in a container; needs bubblewrap (bwrap)")
def grade(arguments: argparse.Namespace) -> int:
    """Grade what a class handed in for a lesson: points per exercise, as tables and as a page for each student.

    A submission is a notebook or a .py file. Pass files, a folder of them, or a folder with one folder per student.
    Each is checked in a process group of its own, under limits; with --contained also in a container, which keeps it
    from other files and from the network. The same command again goes on where the last one ended. Exits with status 0
    when every submission was graded, 1 when one was stopped.
    """
    from distlab.course.classroom import find_submissions, grade_all, refuse_unless_contained, write_tables

    if arguments.contained:
        refuse_unless_contained()
    lesson = load_lesson(arguments.lesson)
    submissions = find_submissions(arguments.submissions, lesson.folder.name)
    out = arguments.out / lesson.folder.name
    out.mkdir(parents=True, exist_ok=True)
    kept, seed = out / "seed", arguments.seed
    if seed is None:  # that of the last run, or a new one
        seed = int(kept.read_text(encoding="utf-8")) if kept.exists() else secrets.randbelow(10**6)
    kept.write_text(f"{seed}\n", encoding="utf-8")
    how = {"jobs": arguments.jobs, "minutes": arguments.minutes, "is_contained": arguments.contained}
    grades = []
    try:
        for one, is_new in grade_all(submissions, lesson, out / "results", seed=seed, **how):
            grades.append(one)
            told = ["" if is_new else " (kept)", *one.notes, *([f"stopped: {one.stopped}"] if one.stopped else [])]
            print(f"{one.student:24} {one.points:3} of {one.possible}{'; '.join(told)}", flush=True)
    except KeyboardInterrupt:
        print("\nInterrupted. What is graded is kept; the same command goes on.", flush=True)
        return 130
    grades.sort()
    write_tables(out, f"Lesson {lesson.number}, {lesson.title}", grades)
    pages = "in students/ a page for each and Gradescope's results.json"
    print(f"\n{len(grades)} graded: {out / 'grades.html'}, grades.csv, grades.json; {pages}")
    return 1 if any(one.stopped for one in grades) else 0
