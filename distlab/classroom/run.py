"""Check many submissions side by side, each in a process group of its own with limits on time, files and output.

What a submission does stays with it. It is copied into a temporary folder, which is also its home. Its code runs in
ranks, under the limits of `distlab.grading.guard`. Results come through a pipe that no rank has, and are written by
this process. When it ends, or a limit ends it, all its processes are killed and its folder goes. It still runs as your
user: submissions that you would not run yourself are for `contained`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from distlab import __version__
from distlab.classroom.contained import in_container
from distlab.classroom.marks import Grade, grade_of, read_grade, write_grade
from distlab.classroom.submissions import Submission
from distlab.grading import Lesson

MARK = "DISTLAB_GRADE"  # in the environment of every process of a submission
LOOK_S = 0.2
END_S = 60.0  # for a check that has closed its pipe to end, also on a busy machine
LAST_WORDS = 400


class Limits(NamedTuple):
    """What one submission may take.

    Attributes:
        minutes: for all of its exercises.
        folder_bytes: that it may write.
        is_contained: whether it runs in a container, which keeps it from other files and the network.
    """

    minutes: float = 10.0
    folder_bytes: int = 1 << 30
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
    ending, turn = threading.Event(), threading.Lock()

    code = lesson_digest(lesson)

    def key_of(submission: Submission) -> str:
        return "/".join((__version__, code, submission.digest, str(seed)))

    def grade(submission: Submission) -> Grade:
        key = key_of(submission)
        kept = None if submission.problem else read_grade(results, submission.student, key)
        found = kept or _grade(submission, lesson, seed, limits or Limits(), ending)
        with turn:
            if not ending.is_set():
                if kept is None:
                    write_grade(results, found, key)
                tell(found, kept is None)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(grade, submission) for submission in submissions]
        try:
            grades = [_result_of(future) for future in futures]
        except BaseException:
            ending.set()
            for future in futures:
                future.cancel()
            raise
    for submission, one in zip(submissions, grades, strict=True):  # a submission may have written to another's result
        write_grade(results, one, key_of(submission))
    return grades


def _result_of(future: Future[Grade]) -> Grade:
    """Wait in short turns: an interrupt that another thread gets is seen between two of them."""
    while wait([future], LOOK_S).not_done:
        pass
    return future.result()


def lesson_digest(lesson: Lesson) -> str:
    """Return a digest of the lesson's exercises, checks and solutions."""
    digest = hashlib.sha256()
    for path in sorted([*lesson.folder.glob("*.py"), *lesson.folder.glob("checks/*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _grade(submission: Submission, lesson: Lesson, seed: int, limits: Limits, ending: threading.Event) -> Grade:
    lines: list[dict[str, Any]] = []
    stopped = submission.problem
    if submission.path is not None and not stopped:
        home = Path(tempfile.mkdtemp(prefix="distlab-grade-"))
        try:
            copy = home / submission.path.name
            copy.write_bytes(submission.data)
            task = {"lesson": lesson.number, "folder": str(lesson.folder.parent), "file": str(copy), "seed": seed}
            lines, stopped = _check(task, home, limits, ending)
            stopped = stopped.replace(f"{home}/", "")
            for line in lines:
                line["message"] = str(line.get("message", "")).replace(f"{home}/", "")
        finally:
            shutil.rmtree(home, ignore_errors=True)
    file = "" if submission.path is None else str(submission.path)
    return grade_of(submission.student, file, submission.digest, lesson.exercises, lines, stopped)


def _check(
    task: dict[str, Any], home: Path, limits: Limits, ending: threading.Event
) -> tuple[list[dict[str, Any]], str]:
    """Run the check in a process group of its own; return its lines, and why it was stopped, or ""."""
    ours, theirs = os.pipe()
    mark = uuid.uuid4().hex
    places = ["env", f"{MARK}={mark}", f"HOME={home}", f"TMPDIR={home}"]
    if limits.is_contained:
        places = [*in_container(home, [Path(task["folder"])]), *places]
    with open(ours, "rb", buffering=0) as pipe, tempfile.TemporaryFile() as words:
        with subprocess.Popen(
            [*places, sys.executable, "-m", "distlab.classroom.one", json.dumps({**task, "pipe": theirs})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=words,
            cwd=home,
            pass_fds=(theirs,),
            start_new_session=True,
        ) as process:
            os.close(theirs)
            try:
                lines, stopped = _listen(pipe, home, limits, ending)
                if not stopped:
                    process.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                stopped = "its check did not end"
            finally:
                _kill(process.pid, mark)
        if not stopped and lines and "unread" in lines[0]:
            return [], str(lines[0]["unread"])
        if not stopped and process.returncode:
            words.seek(0)
            last = " ".join(words.read().decode(errors="replace").split())[-LAST_WORDS:]
            stopped = f"its check ended with status {process.returncode}: {last or 'no words'}"
    return lines, stopped


def _listen(pipe: Any, home: Path, limits: Limits, ending: threading.Event) -> tuple[list[dict[str, Any]], str]:
    """Read lines until the pipe closes or a limit is reached."""
    lines: list[dict[str, Any]] = []
    deadline = time.monotonic() + 60 * limits.minutes
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if selector.select(LOOK_S):
                data = os.read(pipe.fileno(), 1 << 16)
                if not data:
                    return lines, ""
                *whole, rest = (rest + data).split(b"\n")
                lines += map(json.loads, whole)
            if ending.is_set():
                return lines, "grading was interrupted"
            if time.monotonic() > deadline:
                return lines, f"it ran for {limits.minutes:g} minutes, the limit; pass --minutes for more"
            if (size := _size(home)) > limits.folder_bytes:
                return lines, f"it wrote {size / 1e6:.0f} MB of files; the limit is {limits.folder_bytes / 1e6:.0f} MB"


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder; what goes away meanwhile counts nothing."""
    total = 0
    for place, _, files in os.walk(folder):  # it passes over folders that are gone; Path.rglob raises
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _kill(pid: int, mark: str) -> None:
    """Kill the process group, and whatever else carries the submission's mark."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for environment in Path("/proc").glob("[0-9]*/environ"):  # on systems without /proc the group has to do
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)
