"""Check many submissions side by side, each in a process group of its own with limits on time, files and output.

What a submission does stays with it. It is copied into a temporary folder, which is also its home. Its code runs in
ranks, under the limits of `distlab.course.grading.guard`. Results come through a pipe that no rank has. When it ends,
or a limit ends it, all its processes are killed and its folder goes. It still runs as your user.

In a container of bubblewrap (`bwrap`) it sees Python, torch, this library and the lessons, all read-only, and one
folder to write in: no other submission, no grades, no keys in a home folder, no network. It can read the lesson's
references: checks need them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from distlab.course.classroom.submissions import Grade, Submission, grade_of
from distlab.course.grading import Lesson, load_lesson
from distlab.faces import version

LOOK_S = 0.2
FOLDER_BYTES = 1 << 30  # that one submission may write
MAX_MORE_PROCESSES = 1024  # threads count too: eight ranks have some hundred, and other submissions run beside this one
CHECK_ONE = "from distlab.course.classroom.run import check_one; check_one()"
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_BWRAP = "--unshare-all --die-with-parent --cap-drop ALL --proc /proc --dev /dev --size 1073741824 --tmpfs /dev/shm"


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
    ending, code = threading.Event(), hashlib.sha256()
    for path in sorted([*lesson.folder.glob("*.py"), *lesson.folder.glob("checks/*.py")]):  # all that decides a verdict
        code.update(path.name.encode() + b"\0" + path.read_bytes())

    def grade(one: Submission) -> tuple[Grade, bool]:
        try:
            data = one.path.read_bytes() if one.path else b""
        except OSError as error:  # the others are graded
            return grade_of(one, lesson, (), f"{one.path} cannot be read ({error.strerror})"), True
        key = "/".join((version(), code.hexdigest()[:16], hashlib.sha256(data).hexdigest(), str(seed)))
        kept = results / f"{one.student}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none is there, or it is damaged
            if (found := json.loads(kept.read_text(encoding="utf-8")))["key"] == key and not one.problem:
                return grade_of(one, lesson, found["lines"], ""), False
        lines, stopped = list[dict[str, Any]](), one.problem
        if one.path is not None:
            task = {"lesson": lesson.number, "folder": str(lesson.folder.parent), "seed": seed}
            told, stopped = _told(one.path.name, data, task, is_contained, 60 * minutes, ending)
            lines = [json.loads(line) for line in told.split("\n")[:-1]]  # a limit may end it within a line
        if not stopped:
            kept.write_text(json.dumps({"key": key, "lines": lines}), encoding="utf-8")
        return grade_of(one, lesson, lines, stopped), True

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
    name: str, data: bytes, task: dict[str, Any], is_contained: bool, limit_s: float, ending: threading.Event
) -> tuple[str, str]:
    """Check one file in a folder and a process of its own, which end with all that they started.

    Returns:
        what the process told, line by line, and why it was stopped, or "".
    """
    told, stopped, deadline = "", "", time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="distlab-grade-", ignore_cleanup_errors=True) as home:
        (copy := Path(home, name)).write_bytes(data)
        before = in_container(Path(home), [Path(task["folder"])]) if is_contained else []
        command = [*before, "env", f"HOME={home}", f"TMPDIR={home}", sys.executable, "-c", CHECK_ONE]
        command.append(json.dumps(task | {"file": str(copy)}))
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
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
                            stopped = f"it ran for {limit_s / 60:g} minutes, the limit; pass --minutes for more"
                        elif (size := _size(Path(home))) > FOLDER_BYTES:
                            stopped = f"it wrote {size / 1e6:.0f} MB of files; the limit is {FOLDER_BYTES / 1e6:.0f} MB"
                finally:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                if stopped:
                    told, _ = process.communicate(timeout=60)
            if not stopped and process.returncode:
                words.seek(0)
                last = " ".join(words.read().decode(errors="replace").split())[-400:]
                stopped = f"its check ended with status {process.returncode}: {last or 'no words'}"
    return told.replace(f"{home}/", ""), stopped.replace(f"{home}/", "")


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder; 0 where one goes away meanwhile: the next look counts all again."""
    try:
        return sum(path.lstat().st_size for path in folder.rglob("*"))
    except OSError:
        return 0


def check_one() -> None:
    """Be the process that checks one submission, as the JSON of the first argument says; its code runs in ranks only.

    Each report is a line of JSON on what was this process' standard output, as soon as it is there. No rank inherits
    that, and what else is printed is dropped.
    """
    from distlab.comm.launch.fork_client import OPTIMIZERS, PRELOAD, fork_server
    from distlab.course.grading.answer.submission import isolated_submission
    from distlab.course.grading.check import examine
    from distlab.course.grading.guard import limit_number_of_processes

    task: dict[str, Any] = json.loads(sys.argv[1])
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as out, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        limit_number_of_processes(MAX_MORE_PROCESSES)
        lesson = load_lesson(task["lesson"], Path(task["folder"]))
        if not lesson.uses_optimizers():
            fork_server([module for module in PRELOAD if module != OPTIMIZERS])
        try:
            functions, notes = isolated_submission(task["file"], lesson)
        except ValueError as error:
            print(json.dumps({"unread": str(error)}), file=out)
            return
        print(json.dumps({"notes": [*notes]}), file=out)
        for exercise in lesson.exercises:
            report = examine(exercise, functions[exercise.name], seed=task["seed"])
            print(json.dumps(report.as_dict()), file=out)


def refuse_unless_contained() -> None:
    """See whether a container can be made here.

    Raises:
        ValueError: bubblewrap is not there, or the system does not let it make one; one line that says what to do.
    """
    if which("bwrap") is None:
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
