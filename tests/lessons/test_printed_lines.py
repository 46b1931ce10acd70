"""What the lessons print fits a window of 1280 pixels: 103 characters stand in a line of a cell's output.

JupyterLab, as the course starts it, breaks a longer line between words. So a sentence may be longer, but not a row of a
table, whose columns would be lost; and no line may be a dump that nobody reads.
"""

import re
from pathlib import Path

import nbformat
import pytest

WIDTH, LONGEST = 103, 480
ROW = re.compile(r"\S {2,}\S")  # two spaces or more between words: a column begins
NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "lessons").glob("**/*.ipynb"))


def printed_lines(notebook):
    """Yield the place of each cell and each line that it printed, pictures' texts left out."""
    for place, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = output.get("text", "") or ("" if len(data) > 1 else data.get("text/plain", ""))
            yield from ((place, line) for line in text.splitlines())


def too_long(line):
    """Tell whether a printed line does not fit: a row of a table, or any line that is far too long."""
    return len(line) > (WIDTH if ROW.search(line.strip()) else LONGEST)


def test_a_row_that_does_not_fit_and_a_dump_are_found_and_a_sentence_is_not():
    assert too_long("ring   4.5 MB".ljust(WIDTH, ".") + "..")
    assert not too_long("ring   4.5 MB".ljust(WIDTH, "."))
    assert not too_long("a sentence of many words " * 8)
    assert too_long("[0.004630905110388994, " * 40)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_printed_lines_fit(path):
    notebook = nbformat.read(path, as_version=4)
    found = [f"cell {place}: {line[:120]}" for place, line in printed_lines(notebook) if too_long(line)]
    assert found == []


def test_ideal_times_of_schedules_are_not_called_predictions():
    """Lesson 9's bench lays real steps beside times that know no messages: on paper, as the text says."""
    for name in ("lesson.ipynb", "solution.ipynb"):
        text = (Path(__file__).resolve().parents[2] / "lessons" / "09_pipeline" / name).read_text(encoding="utf-8")
        assert "on paper), busy" in text
        assert "predicted), busy" not in text
