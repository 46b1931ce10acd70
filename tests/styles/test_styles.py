"""Answers that are right and written in other ways than the references: every check must pass them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from distlab.course.grading import Exercise, lessons, load_lesson
from distlab.course.grading.check import examine

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
FEWEST = 2


def exercises(after: int = 0) -> list[Exercise]:
    """Return those of every lesson, or those after its first ones."""
    return [exercise for number in lessons(LESSONS) for exercise in load_lesson(number, LESSONS).exercises[after:]]


def answers_to(lesson: str) -> dict[str, dict[str, Callable[..., Any]]]:
    """Return by exercise what its lesson's file here defines: the name of each answer begins with the exercise's."""
    module = importlib.import_module(f"styles_{lesson}")
    found: dict[str, dict[str, Callable[..., Any]]] = {one.name: {} for one in exercises() if one.lesson == lesson}
    for name, value in vars(module).items():
        own = [one for one in found if name.startswith(f"{one.partition('.')[2]}_")]
        is_imported = isinstance(value, FunctionType) and value.__module__ != module.__name__
        if own and callable(value) and not is_imported:
            found[max(own, key=len)][name] = value
    return found


ANSWERS = {name: answers for number in lessons(LESSONS) for name, answers in answers_to(number).items()}
ALL = [
    pytest.param(exercise, answer, id=f"{exercise.name}-{name}")
    for exercise in exercises()
    for name, answer in ANSWERS[exercise.name].items()
]


def test_every_exercise_has_answers_in_other_styles() -> None:
    assert [name for name, answers in ANSWERS.items() if len(answers) < FEWEST] == []


@pytest.mark.soak_where(exercise=exercises(after=1))  # how the checks of a lesson judge is much the same
@pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.name)
def test_one_of_them_passes(exercise: Exercise) -> None:
    world = 3 if 3 in exercise.worlds else exercise.worlds[-1]
    report = examine(exercise, next(iter(ANSWERS[exercise.name].values())), worlds=(world,), seed=0)
    assert report.passed, str(report)


@pytest.mark.soak
@pytest.mark.parametrize(("exercise", "answer"), ALL)
def test_all_of_them_pass_on_every_number_of_ranks(exercise: Exercise, answer: Callable[..., Any]) -> None:
    report = examine(exercise, answer)
    assert report.passed, str(report)
    assert report.worlds == exercise.worlds
