"""What `make test` runs smaller in a notebook's cells stands there once, and in no cell whose output is compared."""

import json
from pathlib import Path

import pytest

from tests.lessons.smaller import SMALLER, smaller

LESSONS = Path(__file__).resolve().parents[2] / "lessons"


@pytest.mark.parametrize("lesson", SMALLER)
def test_each_text_stands_in_one_cell_that_is_not_compared(lesson):
    (path,) = LESSONS.glob(f"{lesson}_*/solution.ipynb")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    for text in SMALLER[lesson]:
        found = [cell for cell in cells for _ in range("".join(cell["source"]).count(text))]
        assert len(found) == 1, text
        assert "nbval-check-output" not in found[0]["metadata"].get("tags", ()), text


def test_a_cell_is_made_smaller_and_keeps_its_lines():
    lines = ["def measure(a, repeats=25):\n", "    return a"]
    assert smaller(lines, "01") == ["def measure(a, repeats=2):\n", "    return a"]
    assert smaller(lines, "02") == lines
