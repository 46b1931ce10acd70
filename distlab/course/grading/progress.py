"""Keep what was passed and predicted in one JSON file in the folder of the learner's working copies.

Two notebooks may check at once: each change reads, alters and replaces the file under a lock. A file that cannot be
read is moved aside, never written over. Outside such a folder, this process remembers what it was told until it ends.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.comm.command import runnable
from distlab.course.grading.lesson import at_or_above, lessons_folder, work_beside
from distlab.trace.chrome import replace_file

if TYPE_CHECKING:
    from distlab.course.grading.report import Report

MARKER = ".distlab-work"
FILE = "progress.json"
MINE = "mine"  # --impl mine: the learner's working copy of the lesson
SCHEMA = 1
OPEN = "open"  # in MARKER: nothing is closed, as the builder and an instructor want it
FAILED_CHECKS = 3  # wrong answers before the solution is shown
OUTSIDE = "Your progress is not kept: that is done for answers in the folder that `distlab lesson start` makes."


@dataclass(frozen=True)
class Entry:
    """What is known about one exercise.

    Attributes:
        attempts: checks of an answer, right or wrong; one that is not written yet does not count.
        first_passed: time of the first right answer (ISO 8601, UTC), or "".
        budget: what the last right answer used.
        failed: checks of a wrong answer.
        hints: how many of its hints were seen.
        solution_seen: time when the solution was first shown, or "".
    """

    attempts: int = 0
    first_passed: str = ""
    budget: tuple[str, ...] = ()
    failed: int = 0
    hints: int = 0
    solution_seen: str = ""

    @property
    def passed(self) -> bool:
        """Whether it was ever right."""
        return bool(self.first_passed)


@dataclass
class Record:
    """All that is known about one learner.

    Attributes:
        exercises: what is known about each exercise, by its name.
        predictions: the numbers that the learner gave, by the question with its unit.
        measured: what came true, as it was first shown, by the same name; without a prediction where none was given.
    """

    exercises: dict[str, Entry] = field(default_factory=dict)
    predictions: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)


_remembered = Record()  # outside a folder of working copies


def work_folder(start: Path | None = None) -> Path | None:
    """Return the folder of working copies that holds `start` (by default the working directory), or None."""
    return next((folder for folder in at_or_above(start) if (folder / MARKER).exists()), None)


def copy_in(work: Path, folder: str) -> Path:
    """Return the path of a lesson's working copy."""
    return work / folder / f"{folder}.ipynb"


def working_copy(folder: str) -> Path:
    """Return the path of the learner's own copy of a lesson's notebook, looked for from the working directory.

    Args:
        folder: name of the lesson's folder, such as 03_data_parallel.

    Raises:
        ValueError: there is none.
    """
    places = [work_folder(), work_beside(lessons_folder()), Path.cwd() / "work"]
    copies = [copy_in(place, folder) for place in places if place is not None]
    if copy := next((copy for copy in copies if copy.is_file()), None):
        return copy
    raise ValueError(
        f"there is no working copy of lesson {folder[:2]} yet: `{runnable('distlab lesson start')}` makes one; or say "
        "where your answers are, with --impl MODULE, --impl FILE.py or --impl NOTEBOOK.ipynb"
    )


def keep(report: Report, start: Path | None = None) -> str:
    """Write a report down; return one line where it was not kept, or where something else must be told.

    With the third wrong answer the line says how to see hints and the solution.
    """
    if report.verdict not in ("passed", "wrong"):
        return OUTSIDE if work_folder(start) is None else ""
    name = report.exercise.name

    def updated(entry: Entry) -> Entry:
        entry = replace(entry, attempts=entry.attempts + 1)
        if not report.passed:
            return replace(entry, failed=entry.failed + 1)
        return replace(entry, first_passed=entry.first_passed or now(), budget=report.budget)

    told = change_entry(name, updated, start) or ("" if work_folder(start) else OUTSIDE)
    entry = entry_of(name, start)
    if report.passed or entry.failed != FAILED_CHECKS or entry.passed or entry.solution_seen:
        return told
    first = f'hint("{name}") shows a hint, and after all hints ' if report.exercise.hints else ""
    return f'Stuck? In the notebook, {first}solution("{name}") shows the solution. {told}'.rstrip()


def change_entry(name: str, alter: Callable[[Entry], Entry], start: Path | None = None) -> str:
    """Replace what is known about one exercise; return one line where it cannot be kept, or where more must be told."""

    def change(record: Record) -> None:
        record.exercises[name] = alter(record.exercises.get(name, Entry()))

    return _change(change, start)


def keep_prediction(question: str, value: float, start: Path | None = None) -> str:
    """Write down the number that the learner gave; return one line where it cannot be kept, or more must be told."""
    return _change(lambda record: record.predictions.update({question: value}), start)


def keep_measured(question: str, value: float) -> None:
    """Write down what came true, where that was not known; infinity is left out, as JSON has no such number."""
    if math.isfinite(value):
        _change(lambda record: record.measured.setdefault(question, value), None)


def closes() -> bool:
    """Return whether answers stay closed until they are predicted: in a folder of working copies that is not OPEN."""
    folder = work_folder()
    return folder is not None and (folder / MARKER).read_text("utf-8").strip() != OPEN


def entry_of(name: str, start: Path | None = None) -> Entry:
    """Return what is known about one exercise; outside a work folder, what this process remembers of it."""
    return record_of(start).exercises.get(name, Entry())


def now() -> str:
    """Return the time as the file has it: ISO 8601, UTC, whole seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def record_of(start: Path | None = None) -> Record:
    """Return all that is known; outside a work folder what this process remembers, nothing where a file is damaged."""
    folder = work_folder(start)
    try:
        return _remembered if folder is None else _parse((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return Record()


def _change(alter: Callable[[Record], object], start: Path | None) -> str:
    """Read the folder's record, alter it and write it, under the lock; return what must be told, in one line."""
    import fcntl

    folder = work_folder(start)
    if folder is None:
        alter(_remembered)
        return ""
    try:
        with open(folder / MARKER, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the system releases it when a process ends
            record, told = _read(folder)
            alter(record)
            _write(folder, record)
    except OSError as error:
        return f"Your progress is not kept: {folder / FILE} cannot be written ({error.strerror or error})."
    return told


def _read(folder: Path) -> tuple[Record, str]:
    """Return the record; a damaged file is moved aside first, and the second value says so."""
    path = folder / FILE
    try:
        return _parse(path.read_bytes()), ""
    except FileNotFoundError:
        return Record(), ""
    except (ValueError, OSError) as error:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        aside = folder / f"progress.damaged-{stamp}-{os.getpid()}.json"
        path.rename(aside)
        reason = " ".join(str(error).split())
        return Record(), f"{FILE} could not be read ({reason}); it is now {aside.name}, and a new one was begun."


def _parse(data: bytes) -> Record:
    """Read the file's text; a ValueError says that it is not what `_write` wrote."""
    found: Any = json.loads(data)
    if not isinstance(found, dict) or not isinstance(found.get("exercises"), dict):
        raise ValueError("it has no exercises")
    if found.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {found.get('schema')!r}, not {SCHEMA}")
    exercises = {str(name): _entry(name, fields) for name, fields in found["exercises"].items()}
    return Record(exercises, *(_numbers(name, found.get(name, {})) for name in ("predictions", "measured")))


def _numbers(name: str, found: Any) -> dict[str, float]:
    values: list[Any] = [*found.values()] if isinstance(found, dict) else [None]
    if any(type(one) not in (int, float) or not abs(one) <= sys.float_info.max for one in values):
        raise ValueError(f"its {name} are damaged")
    return {question: float(value) for question, value in found.items()}


def _entry(name: str, found: Any) -> Entry:
    kinds = {each.name: type(each.default) for each in fields(Entry)} | {"budget": list}
    if not isinstance(found, dict) or any(not isinstance(found.get(key), kind) for key, kind in kinds.items()):
        raise ValueError(f"its entry {name!r} is damaged")
    known = {key: found[key] for key in kinds}
    return Entry(**known | {"budget": tuple(map(str, found["budget"]))})


def _write(folder: Path, record: Record) -> None:
    """Replace the file in one step, so that a reader or a crash sees the old one or the new one."""
    exercises = {name: asdict(entry) for name, entry in record.exercises.items()}
    data = {"schema": SCHEMA, "exercises": exercises, "predictions": record.predictions, "measured": record.measured}
    replace_file(folder / FILE, f"{json.dumps(data, indent=2, sort_keys=True)}\n".encode())
