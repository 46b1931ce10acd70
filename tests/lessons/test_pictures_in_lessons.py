"""Every lesson opens with a picture, and never goes on for long without one.

Something to look at is an image in what a code cell shows: a picture with its words, or a panel or timeline (a reader
without a kernel sees its image). A check's report, a printed table and a table in the text are not.
"""

import json
from pathlib import Path

import pytest

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
WITH_PICTURES = tuple(f"{number:02}" for number in range(1, 16))
FIRST_PICTURE = 6  # the cell, counted from 1, in which the first picture stands at the latest
MOST_WITHOUT = 15


def has_image(output):
    data = output.get("data", {})
    return "image/png" in data or "<img" in "".join(data.get("text/html", ()))


def pictures(number):
    """The numbers, from 1, of the cells of a lesson that show an image, and the number of its cells."""
    (folder,) = LESSONS.glob(f"{number}_*")
    cells = json.loads((folder / "lesson.ipynb").read_text())["cells"]
    cells = [cell for cell in cells if "[Map of the course]" not in "".join(cell["source"])]  # the builder's links
    return [i for i, cell in enumerate(cells, 1) if any(map(has_image, cell.get("outputs", ())))], len(cells)


def longest_without(places, num_cells):
    """How many cells in a row show nothing, and the first of them."""
    ends = [0, *places, num_cells + 1]
    return max((after - before - 1, before + 1) for before, after in zip(ends, ends[1:], strict=False))


def test_the_longest_row_is_found_between_and_at_both_ends():
    assert longest_without([3, 10], 12) == (6, 4)
    assert longest_without([9, 10], 12) == (8, 1)
    assert longest_without([1], 12) == (11, 2)
    assert longest_without([], 12) == (12, 1)


def test_a_report_and_a_table_are_no_images():
    assert not has_image({"data": {"text/html": ["<b>Correct.</b><table></table>"], "text/plain": ["Correct."]}})
    assert not has_image({"output_type": "stream", "text": "a table"})
    assert has_image({"data": {"text/html": ['<img alt="a ring" src="data:image/png;base64,">']}})
    assert has_image({"data": {"image/png": ""}})


@pytest.mark.parametrize("number", WITH_PICTURES)
def test_a_lesson_opens_with_a_picture(number):
    places, _ = pictures(number)
    assert min(places, default=FIRST_PICTURE + 1) <= FIRST_PICTURE


@pytest.mark.parametrize("number", WITH_PICTURES)
def test_no_long_row_of_cells_has_nothing_to_look_at(number):
    most, first = longest_without(*pictures(number))
    assert most <= MOST_WITHOUT, f"lesson {number}: {most} cells without a picture, from cell {first} on"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("05", ["Loss against bytes sent", "no compression needs", "top-1 % needs"]),
        ("06", ["over one update", "bfloat16 autocast", "float32, recomputed", "bfloat16, recomputed"]),
    ],
)
def test_curves_that_readers_would_rather_see_are_drawn(number, words):
    """Loss over bytes, and memory over an update by precision and recompute; words are the picture's own text."""
    (folder,) = LESSONS.glob(f"{number}_*")
    cells = json.loads((folder / "lesson.ipynb").read_text())["cells"]
    shown = [output for cell in cells for output in cell.get("outputs", ()) if has_image(output)]
    told = ["".join(output["data"]["text/plain"]) for output in shown]
    assert [text for text in told if all(word in text for word in words)]
