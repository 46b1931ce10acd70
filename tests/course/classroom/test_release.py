"""A student copy: the checks run there, nobody reads a solution, and hidden cases are not in it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distlab.cli import main
from distlab.course.classroom import release
from distlab.course.grading import lessons, load_lesson
from distlab.course.grading.sealed import seal, unseal

ROOT = Path(__file__).resolve().parents[3]
LESSONS = ROOT / "lessons"


def lines_of_bodies(path: Path) -> set[str]:
    """Return the longer lines of the last statement of each function: what a copy must not show."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    lines = path.read_text().splitlines()
    found = {lines[n - 1].strip() for node in functions for n in range(node.body[-1].lineno, node.end_lineno + 1)}
    return {line for line in found if len(line) > 40 and not line.startswith(('"""', "#", "return {", "raise"))}


IN_THE_COPY = """
from distlab.comm.launch.fork_client import OPTIMIZERS, PRELOAD, fork_server
from distlab.course.grading import lessons, load_lesson, progress
from distlab.course.grading.check import examine
from distlab.course.grading.lesson import reference_of
from distlab.course.notebook import solution

fork_server([module for module in PRELOAD if module != OPTIMIZERS])

def exposed_ns(compute, calls):
    return sum(end - start for start, end in calls)

print([one.name for number in lessons() for one in load_lesson(number).exercises])
shift = load_lesson("01").exercise("01.shift")
print(shift.vary, shift.mutants != ())
print(examine(shift, reference_of(shift), worlds=(1, 2)))
print(examine(shift, lambda tensor: tensor.clone(), worlds=(2,)))
progress._remembered.exercises["01.shift"] = progress.Entry(failed=3, hints=3)
print(repr(solution("01.shift")))
print(examine(load_lesson("13").exercise("13.exposed"), exposed_ns))
"""


def test_every_lesson_can_be_released_and_its_checks_run_there_without_drawn_cases_and_solutions(tmp_path):
    copies = release(LESSONS, tmp_path / "copy", title="Distributed training, autumn")
    assert [copy.name[:2] for copy in copies] == list(lessons(LESSONS))
    for copy in copies:
        original = LESSONS / copy.name
        names = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
        assert {"lesson.ipynb", "exercises.py", "solutions.py"} <= names
        assert not names & {"solution.ipynb", "lesson.py"}
        tracked = subprocess.run(["git", "ls-files"], cwd=original, capture_output=True, text=True).stdout.split()
        assert set(tracked) - names <= {"solution.ipynb", "lesson.py"}, "notebooks and labs read the others"
        shown = "\n".join(path.read_text() for path in copy.rglob("*.py") if path.name != "lab.py")
        texts = [original / "solutions.py", *original.glob("checks/*.py")]
        hidden = set().union(*(lines_of_bodies(path) for path in texts))
        assert hidden
        assert [line for line in hidden if line in shown] == []
    for name in ("START.ipynb", "GUIDES.ipynb", "guides/trial.py"):
        assert (tmp_path / "copy" / "lessons" / name).is_file()
    assert not (tmp_path / "copy" / "lessons" / "COMMON_FAULTS.md").exists()
    assert (tmp_path / "copy" / "README.md").read_text().startswith("# Distributed training, autumn\n")

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", IN_THE_COPY], cwd=tmp_path / "copy", env=environment, capture_output=True, text=True
    )
    names, said = ran.stdout.split("\n", 1)
    assert names == str([one.name for number in lessons(LESSONS) for one in load_lesson(number, LESSONS).exercises])
    assert said.startswith("None True\nCorrect. 01.shift"), ran.stderr
    assert "Wrong: " in said
    assert "solution: this copy has no solution of 01.shift; ask your instructor" in said
    assert "that is the sum of the calls" in said, "a sealed wrong version names the fault"


def test_what_cannot_be_released_is_said_in_one_line(tmp_path, capsys):
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("keep me")
    for arguments, words in (
        ([str(full)], "holds something already"),
        ([str(full / "mine.txt")], "holds something already"),
        ([str(tmp_path / "new"), "--lessons", "77"], "there is no lesson 77"),
    ):
        assert main(["release", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    assert [path.name for path in full.iterdir()] == ["mine.txt"]


def test_a_sealed_module_defines_what_its_text_does_and_damage_is_named():
    namespace: dict[str, object] = {}
    sealed = seal("from __future__ import annotations\nx = 3\ndef double(n: None): return 2 * n\n", "lesson 99")
    exec(sealed, namespace)
    assert namespace["double"](namespace["x"]) == 6
    assert "double" not in sealed
    with pytest.raises(ValueError, match="the sealed checks of lesson 99 are damaged"):
        unseal({}, "checks of lesson 99", "c-rk(damaged")
