"""Lesson 3 has two sittings: the second runs in a fresh kernel, after the lesson's first code cell alone."""

from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from distlab.grading.progress import MARKER, change_entry, now

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
SECOND = "# Sitting two"
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


def notebook():
    return nbformat.read(LESSONS / "03_data_parallel" / "solution.ipynb", as_version=4)


def second_half(made):
    """The lesson's first code cell, and all cells from the heading of the second sitting on."""
    (start,) = (i for i, cell in enumerate(made.cells) if cell.source.startswith(SECOND))
    first = next(cell for cell in made.cells if cell.cell_type == "code")
    return [first, *made.cells[start:]]


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def run(cells, folder):
    made = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(made, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return [cell for cell in made.cells if cell.cell_type == "code"]


@pytest.mark.soak  # a whole half of a notebook; its cells also run in their order in `make test`
@pytest.mark.timeout(400)
def test_the_second_sitting_runs_without_the_first(tmp_path):
    code = run(second_half(notebook()), tmp_path)  # raises where a cell raises
    told = "\n".join(map(printed, code))
    assert "from your notebook: nothing yet" in told
    assert "to 1e-5: True" in told
    assert "each sample once: True" in told
    assert "token_weights  differs from one process by less than 1e-12" in told


@pytest.mark.timeout(120)
def test_the_second_sitting_takes_what_was_saved_and_passed(tmp_path):
    (tmp_path / MARKER).touch()
    folder = tmp_path / "03_data_parallel"
    folder.mkdir()
    cell = nbformat.v4.new_code_cell
    saved = [
        cell("%load_ext distlab.notebook"),
        cell(OWN),
        cell("def fill_buckets(sizes_bytes, bucket_bytes):\n    1/0"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=saved), folder / "lesson.ipynb")
    change_entry("03.average", lambda entry: replace(entry, attempts=1, first_passed=now()), folder)
    change_entry("03.buckets", lambda entry: replace(entry, attempts=1, failed=1), folder)
    first, bring = [cell for cell in second_half(notebook()) if cell.cell_type == "code"][:2]
    asked = cell("print(average_gradients.__doc__, fill_buckets([4, 4], 4))")
    ended = cell("from distlab.comm.launch.fork_client import shut_down\n\nshut_down()")
    code = run([first, bring, asked, ended], folder)
    assert "from your notebook: 03.average\n" in printed(code[1])
    assert printed(code[2]) == "Mine. [[1], [0]]\n"
