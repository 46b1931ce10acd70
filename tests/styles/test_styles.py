"""Answers that are right and written in other ways than the references: every check must pass them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distlab.course.grading import Exercise, lessons, load_lesson
from distlab.course.grading.check import examine

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
FEWEST = 2
ANSWERS: dict[str, list[Callable[..., Any]]] = {}
for path in sorted(Path(__file__).parent.glob("styles_*.py")):
    for name, answers in importlib.import_module(path.stem).ANSWERS.items():
        ANSWERS[name] = [*ANSWERS.get(name, ()), *answers]


def exercises(after: int = 0) -> list[Exercise]:
    """Return those of every lesson, or those after its first ones."""
    return [exercise for number in lessons(LESSONS) for exercise in load_lesson(number, LESSONS).exercises[after:]]


def named(answer: Any) -> str:
    inner = answer.func if isinstance(answer, functools.partial) else answer
    return str(getattr(inner, "__name__", type(inner).__name__))


ALL = [
    pytest.param(exercise, answer, id=f"{exercise.name}-{named(answer)}")
    for exercise in exercises()
    for answer in ANSWERS.get(exercise.name, ())
]


def test_every_exercise_has_answers_in_other_styles() -> None:
    few = {one.name: len(ANSWERS.get(one.name, ())) for one in exercises() if len(ANSWERS.get(one.name, ())) < FEWEST}
    assert few == {}
    assert set(ANSWERS) == {one.name for one in exercises()}


@pytest.mark.soak_where(exercise=exercises(after=1))  # how the checks of a lesson judge is much the same
@pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.name)
def test_one_of_them_passes(exercise: Exercise) -> None:
    world = 3 if 3 in exercise.worlds else exercise.worlds[-1]
    report = examine(exercise, ANSWERS[exercise.name][0], worlds=(world,), seed=0)
    assert report.passed, str(report)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("exercise", "answer"), ALL)
def test_all_of_them_pass_on_every_number_of_ranks(exercise: Exercise, answer: Callable[..., Any]) -> None:
    report = examine(exercise, answer)
    assert report.passed, str(report)
    assert report.worlds == exercise.worlds
