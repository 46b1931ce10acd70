"""The committed notebooks: lessons ran from top to bottom, with pictures, and print nothing that a window cuts.

That they are what their sources make is a gate's to see. Something to look at is an image in what a code cell shows: a
picture with its words, or a panel or timeline (a reader without a kernel sees its image); a report or a table is not.
JupyterLab breaks a printed line that is too long between words: a sentence may be longer than a window, a row of a
table may not, whose columns would be lost; and no line may be a dump that nobody reads.
"""

import json
import re
from pathlib import Path

import pytest

from tests.lessons.short_kernels import SMALLER, smaller

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
FIRST_PICTURE, MOST_WITHOUT = 6, 15  # the cell in which the first picture stands at the latest; cells without one
WIDTH, LONGEST = 103, 480  # characters that stand in 1280 pixels; of any line
ROW = re.compile(r"\S {2,}\S")  # two spaces or more between words: a column begins
NOTEBOOKS = sorted(LESSONS.rglob("*.ipynb"))


def outputs_of(cell):
    return cell.get("outputs", ())


def has_image(output):
    data = output.get("data", {})
    return "image/png" in data or "<img" in "".join(data.get("text/html", ()))


def longest_without(places, num_cells):
    """How many cells in a row show nothing, and the first of them."""
    ends = [0, *places, num_cells + 1]
    return max((after - before - 1, before + 1) for before, after in zip(ends, ends[1:], strict=False))


def is_too_long(line):
    return len(line) > (WIDTH if ROW.search(line.strip()) else LONGEST)


def printed(output):
    """What a cell printed; a picture's text is left out."""
    data = output.get("data", {})
    return "".join(output.get("text", "") or ("" if len(data) > 1 else data.get("text/plain", "")))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_notebook_was_run_links_inside_and_prints_lines_that_fit(path):
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert "widgets" not in notebook["metadata"]
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if path.stem == "solution":
        assert not any(cell["outputs"] or cell["execution_count"] for cell in code), "kept without outputs"
    else:
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run from top to bottom"
    assert "application/vnd.jupyter.widget-view+json" not in text
    assert str(LESSONS.parent) not in text
    assert "](../../" not in text, "name the file in words; Jupyter's root is the folder of the copies"
    lines = [line for cell in code for output in outputs_of(cell) for line in printed(output).splitlines()]
    assert [line for line in lines if is_too_long(line)] == []


@pytest.mark.parametrize("path", sorted(LESSONS.glob("*/lesson.ipynb")), ids=lambda path: path.parent.name)
def test_a_lesson_opens_with_a_picture_and_never_goes_on_for_long_without_one(path):
    cells = json.loads(path.read_text())["cells"]
    cells = [cell for cell in cells if "[Map of the course]" not in "".join(cell["source"])]  # the builder's links
    places = [i for i, cell in enumerate(cells, 1) if any(map(has_image, outputs_of(cell)))]
    assert min(places, default=FIRST_PICTURE + 1) <= FIRST_PICTURE
    most, first = longest_without(places, len(cells))
    assert most <= MOST_WITHOUT, f"{most} cells without a picture, from cell {first} on"


@pytest.mark.parametrize("path", sorted(LESSONS.glob("*/lesson.py")), ids=lambda path: path.parent.name)
def test_a_prediction_is_shown_again_beside_what_came_true(path):
    text = path.read_text("utf-8")
    guesses = re.findall(r"^(\w+) = predict\(", text, re.MULTILINE)
    assert guesses
    assert [name for name in guesses if not re.search(rf"\b{name}\.(compare|answer)\b", text)] == []


def test_what_is_long_and_what_is_an_image():
    found = [longest_without(*asked) for asked in (([3, 10], 12), ([9, 10], 12), ([1], 12), ([], 12))]
    assert found == [(6, 4), (8, 1), (11, 2), (12, 1)]
    assert not has_image({"data": {"text/html": ["<b>Correct.</b><table></table>"], "text/plain": ["Correct."]}})
    assert has_image({"data": {"text/html": ['<img alt="a ring" src="data:image/png;base64,">']}})
    assert has_image({"data": {"image/png": ""}})
    assert is_too_long("ring   4.5 MB".ljust(WIDTH, ".") + "..")
    assert not is_too_long("ring   4.5 MB".ljust(WIDTH, "."))
    assert not is_too_long("a sentence of many words " * 8)
    assert is_too_long("[0.004630905110388994, " * 40)


def test_words_of_pictures_and_prints_that_readers_look_for():
    """Loss over bytes, and memory over an update by precision; lesson 9's ideal times are not called predictions."""
    for number, words in {
        "05": ["Loss against bytes sent", "no compression needs", "top-1 % needs"],
        "06": ["over one update", "bfloat16 autocast", "float32, recomputed", "bfloat16, recomputed"],
    }.items():
        (path,) = LESSONS.glob(f"{number}_*/lesson.ipynb")
        shown = [output for cell in json.loads(path.read_text())["cells"] for output in outputs_of(cell)]
        told = ["".join(output["data"]["text/plain"]) for output in shown if has_image(output)]
        assert [text for text in told if all(word in text for word in words)]
    (path,) = LESSONS.glob("09_*/lesson.ipynb")
    assert "on paper), busy" in path.read_text(encoding="utf-8")
    assert "predicted), busy" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("lesson", SMALLER)
def test_what_make_test_runs_smaller_stands_in_one_cell_that_is_not_compared(lesson):
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
