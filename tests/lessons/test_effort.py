"""Every exercise says its minutes and its difficulty, and they fit what its lesson says."""

import re
from pathlib import Path

import pytest

from distlab.cli import main
from distlab.course.grading import lessons, load_lesson

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
LEAST, MOST = 0.5, 0.75  # of a lesson's minutes go to its exercises; the others to reading and running


@pytest.mark.parametrize("number", lessons(LESSONS))
def test_exercises_fit_the_minutes_of_their_lesson(number):
    lesson = load_lesson(number, LESSONS)
    for exercise in lesson.exercises:
        assert exercise.minutes >= 1, exercise.name
        assert exercise.difficulty in (1, 2, 3), exercise.name
    total = sum(exercise.minutes for exercise in lesson.exercises)
    assert LEAST * lesson.minutes <= total <= MOST * lesson.minutes
    assert re.search(rf"^# .*\b{lesson.minutes} minutes", (lesson.folder / "lesson.py").read_text(), re.MULTILINE)


def test_they_stand_above_the_function_and_check_lists_them(build, capsys):
    from lesson_notebook import solution_cell, student_cell

    lesson = load_lesson("06", LESSONS)
    for cell in (student_cell, solution_cell):
        first = cell(lesson.exercise("06.recompute"), lesson.folder).splitlines()[0]
        assert first == "# Exercise 06.recompute: about 15 minutes, difficulty 3 of 3"
    assert main(["check", "06", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(lesson.exercises)
    assert lines[0] == "06.states  what a model holds before it has seen any data (about 8 minutes, difficulty 1 of 3)"
