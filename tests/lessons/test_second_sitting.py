"""Lessons 3 and 8 have two sittings: the second runs in a fresh kernel, after the lesson's first code cell alone."""

import ast
import builtins
import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from distlab.course.grading import lessons, load_lesson
from distlab.course.grading.answer.source import names_for_functions
from distlab.course.grading.progress import MARKER, change_entry, now

MOST_IN_ONE_SITTING = 90
LESSONS = Path(__file__).resolve().parents[2] / "lessons"
SECOND = "# Sitting two"
FOLDERS = ("03_data_parallel", "08_tensor_parallel")
OWN = '''
def average_gradients(module):
    """Mine."""
    import torch.distributed as dist
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.grad if parameter.grad is not None else parameter.new_zeros(parameter.shape)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
'''


def notebook(folder="03_data_parallel"):
    return nbformat.read(LESSONS / folder / "solution.ipynb", as_version=4)


def second_half(made):
    """The lesson's first code cell, and all cells from the heading of the second sitting on."""
    (start,) = (i for i, cell in enumerate(made.cells) if cell.source.startswith(SECOND))
    first = next(cell for cell in made.cells if cell.cell_type == "code")
    return [first, *made.cells[start:]]


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def names_in(code, kind):
    """The names that a cell reads (ast.Load) or defines (ast.Store), also those of functions, arguments and imports."""
    nodes = list(ast.walk(ast.parse(code)))
    found = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}
    if kind is ast.Store:
        found |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        found |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        found |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_second_sitting_reads_no_name_of_the_first(folder):
    of_extension = {"check", "predict", "hint", "solution", "show", "last_records", *names_for_functions()}
    defined = set(dir(builtins)) | of_extension
    for cell in second_half(notebook(folder))[1:]:
        if cell.cell_type == "code":
            defined |= names_in(cell.source, ast.Store)
            assert names_in(cell.source, ast.Load) <= defined, cell.source


def test_a_lesson_of_two_hours_has_two_sittings_that_add_up():
    for number in lessons(LESSONS):
        lesson = load_lesson(number, LESSONS)
        said = f"{lesson.minutes} minutes, in two sittings of (\\d+) and (\\d+) minutes"
        found = re.search(said, (lesson.folder / "lesson.py").read_text())
        assert (found is not None) == (lesson.folder.name in FOLDERS) == (lesson.minutes > MOST_IN_ONE_SITTING), number
        if found:
            assert sum(map(int, found.groups())) == lesson.minutes
            headings = [cell.source.splitlines()[0] for cell in notebook(lesson.folder.name).cells]
            assert headings.count("# The end of sitting one") == 1
            assert sum(line.startswith(SECOND) for line in headings) == 1


@pytest.mark.timeout(120)
def test_the_second_sitting_takes_what_was_saved_and_passed(tmp_path):
    (tmp_path / MARKER).touch()
    folder = tmp_path / "03_data_parallel"
    folder.mkdir()
    cell = nbformat.v4.new_code_cell
    saved = [
        cell("%load_ext distlab.course.notebook"),
        cell(OWN),
        cell("def fill_buckets(sizes_bytes, bucket_bytes):\n    1/0"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=saved), folder / "lesson.ipynb")
    change_entry("03.average", lambda entry: replace(entry, attempts=1, first_passed=now()), folder)
    change_entry("03.buckets", lambda entry: replace(entry, attempts=1, failed=1), folder)
    first, bring = [cell for cell in second_half(notebook()) if cell.cell_type == "code"][:2]
    asked = cell("print(average_gradients.__doc__, fill_buckets([4, 4], 4))")
    ended = cell("from distlab.comm.launch.fork_client import shut_down\n\nshut_down()")
    made = nbformat.v4.new_notebook(cells=[first, bring, asked, ended])
    NotebookClient(made, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    assert "from your notebook: 03.average\n" in printed(made.cells[1])
    assert printed(made.cells[2]) == "Mine. [[1], [0]]\n"
