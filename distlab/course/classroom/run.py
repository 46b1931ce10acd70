"""Check many submissions side by side, each in a process group of its own with limits on time, files and output.

What a submission does stays with it. It is copied into a temporary folder, which is also its home. Its code runs in
ranks, under the limits of `distlab.course.grading.guard`. Results come through a pipe that no rank has, and are written
by this process. When it ends, or a limit ends it, all its processes are killed and its folder goes. It still runs as
your
user: submissions that you would not run yourself are for `contained`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from distlab.course.classroom.contained import in_container
from distlab.course.classroom.grades import Grade, Mark, keep_grade, kept_grade
from distlab.course.classroom.submissions import Submission
from distlab.course.grading import Lesson
from distlab.faces import version

LOOK_S = 0.2
END_S = 60.0  # for a pipe to close whose processes were killed
LAST_WORDS = 400
FOLDER_BYTES = 1 << 30  # that one submission may write


class Limits(NamedTuple):
    """How one submission is checked.

    Attributes:
        minutes: for all of its exercises.
        is_contained: whether it runs in a container, which keeps it from other files and the network.
    """

    minutes: float = 10.0
    is_contained: bool = False


def grade_all(
    submissions: Sequence[Submission],
    lesson: Lesson,
    results: Path,
    *,
    seed: int,
    jobs: int = 1,
    limits: Limits | None = None,
    tell: Callable[[Grade, bool], None] = lambda grade, is_new: None,
) -> list[Grade]:
    """Grade every submission that has no result yet; return all grades in the order of submissions.

    Args:
        submissions: see `find_submissions`.
        lesson: whose exercises are checked.
        results: folder with one JSON file per student. A result is taken from there if the submission, the lesson,
            the seed and distlab are the same.
        seed: of the drawn arguments: the same for the whole class.
        jobs: how many submissions run at a time; each has up to four ranks.
        limits: of each submission; by default those of `Limits`.
        tell: called with each grade, and whether it is new.

    Raises:
        KeyboardInterrupt: after the running submissions were ended; results so far are kept.
    """
    results.mkdir(parents=True, exist_ok=True)
    ending, turn, code = threading.Event(), threading.Lock(), lesson_digest(lesson)
    check = partial(_check, limits=limits or Limits(), ending=ending)

    def grade(submission: Submission) -> Grade:
        key = "/".join((version(), code, hashlib.sha256(submission.data).hexdigest(), str(seed)))
        kept = None if submission.problem else kept_grade(results, submission.student, key)
        found = kept or _grade(submission, lesson, seed, key, check)
        with turn:
            if not ending.is_set():
                keep_grade(results, found)
                tell(found, kept is None)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(grade, submission) for submission in submissions]
        try:
            while wait(futures, LOOK_S).not_done:  # in short turns: an interrupt that a different thread gets is seen
                pass
        except BaseException:
            ending.set()
            pool.shutdown(cancel_futures=True)
            raise
    grades = [future.result() for future in futures]
    for one in grades:  # a submission may have written to the result of a different one
        keep_grade(results, one)
    return grades


def lesson_digest(lesson: Lesson) -> str:
    """Return a digest of the lesson's exercises, checks and solutions."""
    digest = hashlib.sha256()
    for path in sorted([*lesson.folder.glob("*.py"), *lesson.folder.glob("checks/*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _grade(submission: Submission, lesson: Lesson, seed: int, key: str, check: Callable[..., tuple[str, str]]) -> Grade:
    told, stopped = "", submission.problem
    if submission.path is not None and not stopped:
        with tempfile.TemporaryDirectory(prefix="distlab-grade-", ignore_cleanup_errors=True) as home:
            copy = Path(home, submission.path.name)
            copy.write_bytes(submission.data)
            task = {"lesson": lesson.number, "folder": str(lesson.folder.parent), "file": str(copy), "seed": seed}
            told, stopped = (text.replace(f"{home}/", "") for text in check(task, Path(home)))
    *whole, _ = told.split("\n")  # a limit may end it within a line
    return grade_of(submission, lesson, key, [json.loads(line) for line in whole], stopped)


def grade_of(submission: Submission, lesson: Lesson, key: str, lines: Sequence[dict[str, Any]], stopped: str) -> Grade:
    """Make a grade of what the process that checked told, line by line."""
    reports = {line.get("exercise"): line for line in lines}
    notes = reports.get(None, {})
    stopped, marks = notes.get("unread", stopped), []
    for exercise in lesson.exercises:
        named: dict[str, Any] = {"verdict": "stopped", "message": stopped}
        if (report := reports.get(exercise.name)) is not None:
            named = {name: report[name] for name in ("verdict", "fault", "message", "seconds")}
        elif submission.path is None and not stopped:
            named = {"verdict": "not attempted", "message": "nothing was handed in"}
        worth = exercise.difficulty
        marks.append(Mark(exercise.name, worth, worth if named["verdict"] == "passed" else 0, **named))
    points, worth = sum(mark.points for mark in marks), sum(mark.worth for mark in marks)
    blocked = sum(mark.worth for mark in marks if mark.verdict == "blocked")
    file, left_out = str(submission.path or ""), tuple(notes.get("notes", ()))
    return Grade(submission.student, file, key, points, worth - blocked, blocked, tuple(marks), left_out, stopped)


def _check(task: dict[str, Any], home: Path, *, limits: Limits, ending: threading.Event) -> tuple[str, str]:
    """Run the check in a process group of its own; return its lines, and why it was stopped, or ""."""
    command = [
        "env",
        f"HOME={home}",
        f"TMPDIR={home}",
        sys.executable,
        "-m",
        "distlab.course.classroom.one",
        json.dumps(task),
    ]
    if limits.is_contained:
        command = [*in_container(home, [Path(task["folder"])]), *command]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    told, stopped, deadline = "", "", time.monotonic() + 60 * limits.minutes
    with tempfile.TemporaryFile() as words:
        with subprocess.Popen(command, cwd=home, stderr=words, start_new_session=True, **pipes) as process:
            try:
                while not stopped:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        told, _ = process.communicate(timeout=LOOK_S)
                        break
                    if ending.is_set():
                        stopped = "grading was interrupted"
                    elif time.monotonic() > deadline:
                        stopped = f"it ran for {limits.minutes:g} minutes, the limit; pass --minutes for more"
                    elif (size := _size(home)) > FOLDER_BYTES:
                        stopped = f"it wrote {size / 1e6:.0f} MB of files; the limit is {FOLDER_BYTES / 1e6:.0f} MB"
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            if stopped:
                told, _ = process.communicate(timeout=END_S)
        if not stopped and process.returncode:
            words.seek(0)
            last = " ".join(words.read().decode(errors="replace").split())[-LAST_WORDS:]
            stopped = f"its check ended with status {process.returncode}: {last or 'no words'}"
    return told, stopped


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder; 0 where one goes away meanwhile: the next look counts all again."""
    try:
        return sum(path.lstat().st_size for path in folder.rglob("*"))
    except OSError:
        return 0
