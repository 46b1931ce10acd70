"""Points: what each exercise of a submission earns, kept as one JSON file per student so that a run can go on later.

An exercise is worth its difficulty, 1 to 3 points. A right answer earns them; a wrong or missing one earns none. An
exercise that this machine cannot run (it needs a GPU) is *blocked*: its points are neither earned nor lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distlab.grading import Exercise

SCHEMA = 1


@dataclass(frozen=True)
class Mark:
    """What became of one exercise.

    Attributes:
        exercise: its name.
        worth: its points.
        verdict: "passed", "wrong", "not attempted", "blocked", or "stopped" where a limit ended the submission first.
        fault: the code of the fault, or None.
        message: what the student is told.
        seconds: how long the check took.
    """

    exercise: str
    worth: int
    verdict: str
    fault: str | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def points(self) -> int:
        """The points that it earned."""
        return self.worth if self.verdict == "passed" else 0


@dataclass(frozen=True)
class Grade:
    """What one student earned in a lesson.

    Attributes:
        student: their name.
        file: what was handed in, or "".
        digest: of its bytes.
        marks: one per exercise, in the lesson's order.
        notes: what was left out of the submission, such as cells with a syntax error.
        stopped: why it was ended early, or "".
    """

    student: str
    file: str
    digest: str
    marks: tuple[Mark, ...]
    notes: tuple[str, ...] = ()
    stopped: str = ""

    @property
    def points(self) -> int:
        """The points that were earned."""
        return sum(mark.points for mark in self.marks)

    @property
    def possible(self) -> int:
        """The points that could be earned on this machine: all but the blocked ones."""
        return sum(mark.worth for mark in self.marks if mark.verdict != "blocked")

    @property
    def blocked(self) -> int:
        """The points of exercises that this machine cannot run."""
        return sum(mark.worth for mark in self.marks) - self.possible


def grade_of(
    student: str, file: str, digest: str, exercises: Sequence[Exercise], lines: Sequence[dict[str, Any]], stopped: str
) -> Grade:
    """Build a grade from what the process that checked told, line by line."""
    notes = next((tuple(line["notes"]) for line in lines if "notes" in line), ())
    told = {line["exercise"]: line for line in lines if "exercise" in line}
    marks = tuple(_mark(exercise, told.get(exercise.name), file, stopped) for exercise in exercises)
    return Grade(student, file, digest, marks, notes, stopped)


def _mark(exercise: Exercise, told: dict[str, Any] | None, file: str, stopped: str) -> Mark:
    if told is not None:
        seconds = float(told["seconds"])
        return Mark(exercise.name, exercise.difficulty, told["verdict"], told["fault"], told["message"], seconds)
    if not file and not stopped:
        return Mark(exercise.name, exercise.difficulty, "not attempted", message="nothing was handed in")
    return Mark(exercise.name, exercise.difficulty, "stopped", message=stopped)


def write_grade(folder: Path, grade: Grade, key: str) -> None:
    """Keep a grade in FOLDER/STUDENT.json, replaced in one step.

    Args:
        folder: of all results.
        grade: what to keep.
        key: names all that the result depends on; `read_grade` wants the same.
    """
    path = folder / f"{grade.student}.json"
    fresh = path.with_suffix(f".{os.getpid()}.new")
    fresh.write_text(json.dumps({"schema": SCHEMA, "key": key, **asdict(grade)}, indent=2), encoding="utf-8")
    os.replace(fresh, path)


def read_grade(folder: Path, student: str, key: str) -> Grade | None:
    """Return the kept grade, or None: there is none, it is damaged, of another key, or was stopped early."""
    try:
        found = json.loads((folder / f"{student}.json").read_text(encoding="utf-8"))
        if found.pop("schema") != SCHEMA or found.pop("key") != key or found["stopped"]:
            return None
        marks = tuple(Mark(**mark) for mark in found.pop("marks"))
        return Grade(**found | {"marks": marks, "notes": tuple(found["notes"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
