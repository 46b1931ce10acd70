"""What a notebook's cell says is enough: each solution runs in a namespace that holds nothing else."""

import ast
import builtins
from pathlib import Path

import pytest

from distlab.grading import lessons, load_lesson
from distlab.grading.check import examine

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
FOUND = [load_lesson(number, LESSONS) for number in lessons(LESSONS)]
EXERCISES = [(lesson.folder, exercise) for lesson in FOUND for exercise in lesson.exercises]


@pytest.mark.parametrize(("folder", "exercise"), EXERCISES, ids=[exercise.name for _, exercise in EXERCISES])
def test_the_solutions_cell_alone_is_right_on_two_ranks(build, folder, exercise):
    from lesson_notebook import solution_cell

    text = solution_cell(exercise, folder)
    alone = {"__builtins__": builtins, "__name__": "__main__"}
    exec(compile(text, f"<{exercise.name}>", "exec"), alone)
    world = 2 if 2 in exercise.worlds else exercise.worlds[0]
    report = examine(exercise, alone[exercise.function], worlds=(world,))
    assert report.passed, str(report)


@pytest.mark.parametrize(("folder", "exercise"), EXERCISES, ids=[exercise.name for _, exercise in EXERCISES])
def test_the_lessons_cell_can_be_run_and_is_not_right(build, folder, exercise):
    from lesson_notebook import student_cell

    text = student_cell(exercise, folder)
    alone = {"__builtins__": builtins, "__name__": "__main__"}
    if exercise.broken is None:
        from distlab.grading import NotYet

        alone["NotYet"] = NotYet
        function = ast.parse(text).body[-1]
        assert isinstance(function, ast.FunctionDef)
        assert len(function.body) == 2, "a docstring and raise NotYet"
    exec(compile(text, f"<{exercise.name}>", "exec"), alone)
    report = examine(exercise, alone[exercise.function])
    assert report.verdict == ("not attempted" if exercise.broken is None else "wrong"), str(report)
    assert len(exercise.hints) == 3
