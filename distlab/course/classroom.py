"""For instructors: `release` writes what a student gets; `grade_all` checks what is handed in; tables of the marks.

What a student gets of a lesson:

| file | in the copy |
|---|---|
| lesson.ipynb, lab.py, exercises.py, and all other files that notebooks and labs read | as it is |
| solutions.py, checks/*.py | sealed: checks run, and name faults as ever; no answer is read by accident |
| checks/varied*.py | hidden: the drawn arguments come when the work is graded |
| solution.ipynb, lesson.py (the notebooks' source) | left out |

An exercise is worth its difficulty, 1 to 3 points. A right answer earns them; a wrong or missing one earns none. An
exercise that this machine cannot run (it needs a GPU) is *blocked*: its points are neither earned nor lost.

A submission is copied into a temporary folder, which is also its home. Its code runs in ranks, under the limits of
`distlab.course.grading.guard`; results come through a file that no rank has. When it ends, or a limit ends it, all its
processes are killed and its folder goes. INSTRUCTORS.md says what is not prevented, with a container and without.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from distlab.comm.launch.forkserver import kill_group
from distlab.course.grading import Lesson, lessons, load_lesson
from distlab.course.grading.lesson import lesson_number
from distlab.course.grading.sealed import seal
from distlab.course.page import page
from distlab.faces import version

HERE = Path(__file__).parent
LOOK_S = 0.2
FOLDER_BYTES = 1 << 30  # that one submission may write
MAX_MORE_PROCESSES = 1024  # threads count too: eight ranks have some hundred, and other submissions run beside this one
CHECK_ONE = "import sys; from distlab.course.classroom import check_one; check_one(*sys.argv[1:])"
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_BWRAP = "--unshare-all --die-with-parent --cap-drop ALL --proc /proc --dev /dev --size 1073741824 --tmpfs /dev/shm"
KINDS = (".ipynb", ".py")
NAMELESS = ("lesson", "answers", "work")  # of files and folders, beside the lesson's own name
LEFT_OUT = ("lesson.py", "solution.ipynb", ".*", "__pycache__")
SHARED = ("COURSE.toml", "GLOSSARY.md", "CHEATSHEET.md", "CAPSTONE.md", "START.ipynb", "GUIDES.ipynb", "predictions.py")


def release(folder: Path, out: Path, numbers: Sequence[str] = (), *, title: str = "distlab") -> list[Path]:
    """Write a student copy of the lessons.

    Args:
        folder: the folder of all lessons.
        out: the copy's folder, which is made.
        numbers: of the lessons, such as "03"; none means all.
        title: the first line of its README.

    Returns:
        the copied lessons' folders.

    Raises:
        ValueError: `out` holds something already or there is no such lesson.
        OSError: it cannot be written.
    """
    have = lessons(folder)
    chosen = [lesson_number(number) for number in numbers] or list(have)
    if unknown := [number for number in chosen if number not in have]:
        raise ValueError(f"there is no lesson {', '.join(unknown)}; lessons are {', '.join(have)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} holds something already; pass a new folder for the student copy")
    copies = [out / "lessons" / path.name for path in sorted(folder.iterdir()) if path.name[:2] in chosen]
    for copy in copies:
        shutil.copytree(folder / copy.name, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for path in [copy / "solutions.py", *sorted(copy.glob("checks/*.py"))]:
            kind = "solutions" if path.parent == copy else "checks"
            is_hidden = kind == "checks" and path.stem.startswith("varied")
            text, own = (HERE / "hidden_cases.txt" if is_hidden else path).read_text(encoding="utf-8"), copy.name[:2]
            path.write_text(text if is_hidden else seal(text, f"{kind} of lesson {own}"), encoding="utf-8")
    for path in filter(Path.is_file, (folder / name for name in SHARED)):
        shutil.copyfile(path, out / "lessons" / path.name)
    if (folder / "guides").is_dir():  # what GUIDES.ipynb runs
        shutil.copytree(folder / "guides", out / "lessons" / "guides", ignore=shutil.ignore_patterns(*LEFT_OUT))
    words = (HERE / "student_readme.txt").read_text(encoding="utf-8")
    words = words.format(title=title, folder=out.name, first=copies[0].name[:2], lesson=copies[0].name)
    (out / "README.md").write_text(words, encoding="utf-8")
    return copies


class Submission(NamedTuple):
    """One student's notebook or module, or None where there is none; or the problem why it cannot be graded, in a line.

    `student` names the student and the files of results: it is the submission's file name, or its folder's.
    """

    student: str
    path: Path | None = None
    problem: str = ""


def find_submissions(paths: Sequence[Path], lesson: str) -> list[Submission]:
    """Return the submissions in files and folders, by student.

    A file is a submission. A folder holds one file per student, or one folder per student; a student's folder holds
    the notebook of the lesson at any depth, as `work/03_data_parallel/03_data_parallel.ipynb` does.

    Args:
        paths: files and folders.
        lesson: name of the lesson's folder, such as 03_data_parallel.

    Raises:
        ValueError: a path is not there or has a different ending, or there is no submission at all. What is wrong with
            one student's files stands in `problem`, and does not keep the others from being graded.
    """
    found: dict[str, list[Path]] = {}
    for path in paths:
        if not path.exists() or (path.is_file() and path.suffix not in KINDS):
            raise ValueError(f"{path} is neither a notebook (.ipynb) nor a module (.py) nor a folder of them")
        for child in sorted(path.iterdir()) if path.is_dir() else [path]:
            if child.name.startswith((".", "__")) or not (child.is_dir() or child.suffix in KINDS):
                continue
            names = (child.stem, *(above.name for above in child.absolute().parents))
            owner = next(name for name in names if name not in (lesson, *NAMELESS))
            hidden = re.compile(r"/(\.|__)").search  # what editors and systems leave beside an answer
            inside = [one for one in sorted(child.rglob("*.*")) if not hidden(str(one)[len(str(child)) :])]
            shown = [one for one in (child, *inside) if one.is_file() and one.suffix in KINDS]
            found.setdefault(re.sub(r"[^\w.@+-]+", "_", owner) or "student", []).extend(shown)
    if not found:
        listed = ", ".join(map(str, paths))
        raise ValueError(f"{listed}: no submission of lesson {lesson[:2]}; expected notebooks or .py files")
    submissions = []
    for student, files in sorted(found.items()):  # the file of the lesson's name, or the only one that is of no lesson
        of_none = [path for path in files if len(files) == 1 or not re.match(r"\d\d_|(START|GUIDES)$", path.stem)]
        chosen = [path for path in files if path.stem == lesson] or of_none
        listed = ", ".join(path.name for path in chosen[:4])
        problem = f"several files to grade ({listed}); name the right one {lesson}.ipynb" if len(chosen) > 1 else ""
        submissions.append(Submission(student, chosen[0] if len(chosen) == 1 else None, problem))
    return submissions


class Mark(NamedTuple):
    """What became of one exercise: its worth, the points that it earned, and what the student is told.

    The verdict is "passed", "wrong", "not attempted", "blocked", or "stopped" where a limit ended the submission first.
    """

    exercise: str
    worth: int
    points: int
    verdict: str
    fault: str | None
    message: str


class Grade(NamedTuple):
    """What one student earned in a lesson, of the points that are possible and not blocked on this machine.

    `notes` say what was left out of the submission, such as cells with a syntax error; `stopped`, why it was ended
    early, or "".
    """

    student: str
    points: int
    possible: int
    blocked: int
    marks: tuple[Mark, ...]
    notes: tuple[str, ...]
    stopped: str


def grade_of(submission: Submission, lesson: Lesson, told: str, stopped: str) -> Grade:
    """Make a grade of what the process that checked told, line by line; a limit may have ended it within a line."""
    reports = {line.get("exercise"): line for line in map(json.loads, told.split("\n")[:-1])}
    about, marks = reports.get(None, {}), []
    stopped, notes = about.get("unread", stopped), about.get("notes", ())
    missing = {"verdict": "stopped", "fault": None, "message": ""}  # why is said once, not for each exercise
    if submission.path is None and not stopped:
        missing["verdict"], notes = "not attempted", ["nothing was handed in"]
    for one in lesson.exercises:
        verdict, fault, message = (reports.get(one.name, missing)[name] for name in ("verdict", "fault", "message"))
        points = one.difficulty if verdict == "passed" else 0
        marks.append(Mark(one.name, one.difficulty, points, verdict, fault, message))
    blocked = sum(mark.worth for mark in marks if mark.verdict == "blocked")
    points, possible = sum(mark.points for mark in marks), sum(mark.worth for mark in marks) - blocked
    return Grade(submission.student, points, possible, blocked, tuple(marks), tuple(notes), stopped)


def write_tables(out: Path, title: str, grades: Sequence[Grade]) -> None:
    """Write grades.csv, grades.json and grades.html, and in students/ a page and Gradescope's results of each.

    Source: Gradescope, Autograder Specifications, "Output format" of results.json (read 2026-11).
    """
    heads, rows = ["student", "points", "possible", "blocked", "stopped"], list[list[object]]()
    heads += [head for mark in grades[0].marks for head in (mark.exercise, f"{mark.exercise} fault")]
    for one in grades:
        name = f"'{one.student}" if one.student[:1] in "=+-@" else one.student  # no formula in a spreadsheet
        cells = [cell for mark in one.marks for cell in (mark.verdict, mark.fault or "")]
        rows.append([name, one.points, one.possible, one.blocked, one.stopped, *cells])
    faults = Counter((mark.exercise, mark.fault) for each in grades for mark in each.marks if mark.verdict == "wrong")
    often: list[list[object]] = [["what went wrong in", "fault", "answers"]]
    often += ([*fault, count] for fault, count in faults.most_common())
    as_data = [one._asdict() | {"marks": [mark._asdict() for mark in one.marks]} for one in grades]
    links = {str(row[0]): f"students/{one.student}.html" for row, one in zip(rows, grades, strict=True)}
    texts = {"grades.json": json.dumps(as_data, indent=2)}
    texts["grades.html"] = page(title, [], ("", [heads, *rows]), ("", often), links=links)
    for one in grades:
        tests = [
            {"name": mark.exercise, "score": mark.points, "max_score": mark.worth, "output": mark.message}
            for mark in one.marks
            if mark.verdict != "blocked"
        ]
        results = {"tests": tests, "output": "\n".join([*one.notes, one.stopped]).strip()}
        texts[f"students/{one.student}.results.json"] = json.dumps(results, indent=2)
        blocked = f"; {one.blocked} more need a machine that has what they use" if one.blocked else ""
        ended = f"Ended early: {one.stopped}" if one.stopped else ""
        lines = [f"{one.points} of {one.possible} points{blocked}", *one.notes, ended]
        table = [["exercise", "points", "verdict", "what the check said"]]
        table += [[mark.exercise, f"{mark.points} of {mark.worth}", mark.verdict, mark.message] for mark in one.marks]
        texts[f"students/{one.student}.html"] = page(f"{title}: {one.student}", lines, ("", table))
    (out / "students").mkdir(exist_ok=True)
    for path, text in texts.items():
        (out / path).write_text(text, encoding="utf-8")
    with (out / "grades.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([heads, *rows])


def grade_all(
    submissions: Sequence[Submission],
    lesson: Lesson,
    results: Path,
    *,
    seed: int,
    jobs: int = 1,
    minutes: float = 10.0,
    is_contained: bool = False,
) -> Iterator[tuple[Grade, bool]]:
    """Grade every submission that has no result yet; yield each grade once it is there, and whether it is new.

    Args:
        submissions: see `find_submissions`.
        lesson: whose exercises are checked.
        results: folder with one JSON file per student. A result is taken from there if the submission, the lesson,
            the seed and distlab are the same.
        seed: of the drawn arguments: the same for the whole class.
        jobs: how many submissions run at a time; each has up to four ranks.
        minutes: limit of one submission, for all of its exercises.
        is_contained: whether each runs in a container.

    Raises:
        KeyboardInterrupt: after the running submissions were ended; results so far are kept.
    """
    results.mkdir(parents=True, exist_ok=True)
    ending, code = threading.Event(), hashlib.sha256(f"{version()} {seed}".encode())
    for path in sorted([*lesson.folder.glob("*.py"), *lesson.folder.glob("checks/*.py")]):  # all that decides a verdict
        code.update(path.name.encode() + b"\0" + path.read_bytes())

    def grade(one: Submission) -> tuple[Grade, bool]:
        try:
            data = one.path.read_bytes() if one.path else b""
        except OSError as error:  # the others are graded
            return grade_of(one, lesson, "", f"{one.path} cannot be read ({error.strerror})"), True
        key, kept = hashlib.sha256(code.digest() + data).hexdigest(), results / f"{one.student}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none is there, or it is damaged
            if (found := json.loads(kept.read_text(encoding="utf-8")))["key"] == key and not one.problem:
                return grade_of(one, lesson, found["told"], ""), False
        told, stopped = "", one.problem
        if one.path is not None:
            words = [lesson.number, str(lesson.folder.parent), str(seed)]
            told, stopped = _told(one.path.name, data, words, is_contained, 60 * minutes, ending)
        if not stopped:
            kept.write_text(json.dumps({"key": key, "told": told}), encoding="utf-8")
        return grade_of(one, lesson, told, stopped), True

    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(grade, submission) for submission in submissions}
        try:
            while futures:  # in short turns: an interrupt that a different thread gets is seen
                done, futures = wait(futures, LOOK_S, FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            ending.set()
            pool.shutdown(cancel_futures=True)


def _told(
    name: str, data: bytes, words: Sequence[str], is_contained: bool, limit_s: float, ending: threading.Event
) -> tuple[str, str]:
    """Check one file in a folder and a process of its own; return what it told, and why it was stopped, or ""."""
    stopped, deadline, size = "", time.monotonic() + limit_s, 0
    home_of = tempfile.TemporaryDirectory(prefix="distlab-grade-", ignore_cleanup_errors=True)
    with home_of as home, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        (copy := Path(home, name)).write_bytes(data)
        command = ["env", f"HOME={home}", f"TMPDIR={home}", sys.executable, "-c", CHECK_ONE, str(copy), *words]
        command = in_container(Path(home), [Path(words[1])]) + command if is_contained else command
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        with subprocess.Popen(command, cwd=home, start_new_session=True, **pipes) as process:
            try:
                while process.poll() is None and not stopped:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(LOOK_S)
                    with contextlib.suppress(OSError):  # a file that goes away meanwhile
                        size = sum(path.lstat().st_size for path in Path(home).rglob("*"))
                    if ending.is_set():
                        stopped = "grading was interrupted"
                    elif time.monotonic() > deadline:
                        stopped = f"it ran for {limit_s / 60:g} minutes, the limit; pass --minutes for more"
                    elif size > FOLDER_BYTES:
                        stopped = f"it wrote {size / 1e6:.0f} MB of files; the limit is {FOLDER_BYTES / 1e6:.0f} MB"
            finally:
                kill_group(process.pid)
        told, said = (file.read() for file in (out, err) if file.seek(0) == 0)
        if not stopped and process.returncode:
            last = " ".join(said.split())[-400:]
            stopped = f"its check ended with status {process.returncode}: {last or 'no words'}"
    return told.replace(f"{home}/", ""), stopped.replace(f"{home}/", "")


def check_one(file: str, number: str, lessons: str, seed: str) -> None:
    """Be the process that checks one submission; its code runs in ranks only.

    Each report is a line of JSON on what was this process' standard output, as soon as it is there. No rank inherits
    that, and what else is printed is dropped.
    """
    from distlab.comm.command import put_on_path
    from distlab.course.grading.answer.submission import isolated_submission
    from distlab.course.grading.check import examine
    from distlab.course.grading.guard import limit_number_of_processes

    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as out, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        put_on_path()  # commands that a student is told are short
        limit_number_of_processes(MAX_MORE_PROCESSES)
        lesson = load_lesson(number, Path(lessons))
        try:
            functions, notes = isolated_submission(file, lesson)
        except ValueError as error:
            print(json.dumps({"unread": str(error)}), file=out)
            return
        print(json.dumps({"notes": [*notes]}), file=out)
        for exercise in lesson.exercises:
            print(json.dumps(examine(exercise, functions[exercise.name], seed=int(seed)).as_dict()), file=out)


def refuse_unless_contained() -> None:
    """Refuse, by a ValueError that says what to do, where bubblewrap is missing, or can make no container."""
    if shutil.which("bwrap") is None:
        fix = "on Debian or Ubuntu, apt install bubblewrap"
        raise ValueError(f"--contained needs bubblewrap (bwrap), which is not installed: {fix}")
    command = [*in_container(Path("/tmp"), ()), sys.executable, "-c", ""]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if tried.returncode:
        said = " ".join(tried.stderr.split())[-200:] or f"status {tried.returncode}"
        raise ValueError(f"--contained: bubblewrap cannot make a container here ({said}); use a virtual machine")


def in_container(home: Path, readable: Sequence[Path]) -> list[str]:
    """Return what stands before a command to run it in a container; it may write `home` alone."""
    specs = {name: find_spec(name) for name in ("distlab", "simulator", "torch")}
    places = [str(Path(spec.origin).parents[name == "torch"]) for name, spec in specs.items() if spec and spec.origin]
    found = [*_SYSTEM, sys.prefix, sys.base_prefix, site.getusersitepackages(), *places, *map(str, readable)]
    shown = [word for path in dict.fromkeys(found) for word in ("--ro-bind-try", path, path)]
    own = ["--bind", str(home), str(home), "--remount-ro", "/", "--chdir", str(home)]
    return ["bwrap", *_BWRAP.split(), *shown, *own]
