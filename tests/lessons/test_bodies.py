"""A solution's cell is enough: it reads names of its own cell alone and is right; a lesson's cell is not right yet."""

import ast
import builtins
import dis
import linecache
from pathlib import Path
from types import CodeType

import pytest

from distlab.course.grading import NotYet, lessons, load_lesson
from distlab.course.grading.check import examine

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
FOUND = [load_lesson(number, LESSONS) for number in lessons(LESSONS)]
EXERCISES = [(lesson.folder, exercise) for lesson in FOUND for exercise in lesson.exercises]
WORLDS = {(mutant.exercise, mutant.name): mutant.world for lesson in FOUND for mutant in lesson.mutants}


def run_cell(text: str, name: str, **given: object) -> dict[str, object]:
    """Execute a cell alone, with its text where IPython puts it; return its names."""
    names = {"__builtins__": builtins, "__name__": "__main__", **given}
    cell = f"<{name}>"
    linecache.cache[cell] = len(text), None, text.splitlines(keepends=True), cell
    exec(compile(text, cell, "exec"), names)
    return names


@pytest.mark.parametrize(("folder", "exercise"), EXERCISES, ids=[exercise.name for _, exercise in EXERCISES])
def test_the_solutions_cell_is_right_and_uses_no_name_of_another_cell(folder, exercise):
    """On 3 ranks, or the last of its numbers; the kernels of notebooks rely on it (short_kernels.py)."""
    from lesson_notebook import solution_cell

    text = solution_cell(exercise, folder)
    effort = f"about {exercise.minutes} minutes, difficulty {exercise.difficulty} of 3"
    assert text.startswith(f"# Exercise {exercise.name}: {effort}\n")
    alone = run_cell(text, exercise.name)
    missing = names_read(compile(text, "<cell>", "exec")) - set(alone) - set(dir(builtins))
    assert not missing, f"{exercise.name} needs {sorted(missing)}, which its cell does not import"
    worlds = (3 if 3 in exercise.worlds else exercise.worlds[-1],)
    report = examine(exercise, alone[exercise.function], worlds=worlds)
    assert (report.passed, report.worlds) == (True, worlds), str(report)


def names_read(code: CodeType) -> set[str]:
    """Return the names that code, and every function and class in it, looks up outside of functions."""
    steps = list(dis.get_instructions(code))
    made = {step.argval for step in steps if step.opname == "STORE_NAME"}  # in the body of a class: its own
    found = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")} - made
    return found.union(*(names_read(part) for part in code.co_consts if isinstance(part, CodeType)))


def test_a_name_of_another_cell_is_found():
    code = compile("def f(x):\n    return [dist.get_rank() + len(x) for y in x]", "<cell>", "exec")
    assert names_read(code) == {"dist", "len"}


@pytest.mark.parametrize(("folder", "exercise"), EXERCISES, ids=[exercise.name for _, exercise in EXERCISES])
def test_the_lessons_cell_can_be_run_and_is_not_right(folder, exercise):
    from lesson_notebook import student_cell

    text = student_cell(exercise, folder)
    alone = run_cell(text, exercise.name, NotYet=NotYet)
    if exercise.broken is None:  # test_mutants.py checks such a stub of each lesson, and in `make soak` all
        function = ast.parse(text).body[-1]
        assert ast.unparse(function.body[1:]) == f"raise NotYet('{exercise.name}')", "a docstring, and nothing is done"
    else:  # on a number of ranks that reveals what is to be repaired
        report = examine(exercise, alone[exercise.function], worlds=(WORLDS[exercise.name, exercise.broken],))
        assert report.verdict == "wrong", str(report)
    assert len(exercise.hints) == 3
