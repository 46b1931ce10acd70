"""Working copies: made once, never overwritten, put aside on request, whatever state they are in."""

import json
import re
from pathlib import Path

import pytest

from distlab.course.notebook import course_map
from distlab.course.notebook.course import make_copies, reset

LESSONS = Path(__file__).resolve().parents[3] / "lessons"
THIRD = "03_data_parallel/03_data_parallel.ipynb"


def notebook(*sources):
    shown = {"cell_type": "code", "metadata": {}, "outputs": [{"x": 1}], "execution_count": 7}
    cells = [shown | {"id": f"c{place}", "source": source} for place, source in enumerate(sources)]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


@pytest.fixture
def lessons(tmp_path):
    """Two lessons, one that is not built, and START."""
    folder = tmp_path / "lessons"
    for name in ("03_data_parallel", "01_ranks"):
        (folder / name).mkdir(parents=True)
        (folder / name / "lesson.ipynb").write_text(notebook("first", name))
    (folder / "START.ipynb").write_text(notebook("start"))
    (folder / "04_not_built").mkdir()
    return folder


@pytest.fixture
def work(tmp_path):
    return tmp_path / "work"


def copies(lessons, work):
    return {copy.name: copy for copy in make_copies(lessons, work)}


def states(lessons, work):
    return {name: copy.state for name, copy in copies(lessons, work).items()}


def test_copies_are_made_once_and_what_you_wrote_is_kept(lessons, work):
    assert states(lessons, work) == dict.fromkeys(["START.ipynb", "01_ranks/01_ranks.ipynb", THIRD], "made")
    assert (work / ".distlab-work").exists()
    own = json.loads((work / THIRD).read_text())
    cell = own["cells"][0]
    assert (cell["source"], cell["outputs"], cell["execution_count"]) == ("first", [], None)
    assert set(states(lessons, work).values()) == {"kept"}
    original = lessons / "03_data_parallel" / "lesson.ipynb"
    original.write_text(original.read_text().replace('[{"x": 1}]', "[]"))
    assert states(lessons, work)[THIRD] == "kept", "outputs alone, also cleaned ones, make no newer lesson"
    cell["source"] = "my own words"
    (work / THIRD).write_text(before := json.dumps(own))
    assert states(lessons, work)[THIRD] == "kept"
    original.write_text(notebook("better"))
    told = copies(lessons, work)[THIRD]
    assert told.state == "newer"
    assert "there is a newer version" in told.message
    assert "distlab lesson reset 03" in told.message
    assert (work / THIRD).read_text() == before


DAMAGED = {
    "cannot be used: Expecting value": b"",
    "cannot be used: 'utf-8' codec can't decode byte 0xff": b'{"c\xff": 1}',
    "is JSON, but no notebook": b"[1, 2]",
    "is JSON, but no notebook of format 4": notebook("x").replace('"nbformat": 4', '"nbformat": 3').encode(),
}


def test_a_damaged_copy_is_told_exactly_and_left_alone(lessons, work):
    make_copies(lessons, work)
    mine, kept = work / THIRD, []
    for says, damaged in DAMAGED.items():
        mine.write_bytes(damaged)
        told = copies(lessons, work)[THIRD]
        assert told.state == "damaged"
        assert says in told.message
        assert "distlab lesson reset 03" in told.message
        assert mine.read_bytes() == damaged
        aside, fresh = reset("3", lessons, work)
        assert re.fullmatch(r"03_data_parallel\.\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d{6}\.ipynb", aside.name)
        assert fresh == mine
        assert [cell["source"] for cell in json.loads(fresh.read_text())["cells"]] == ["first", "03_data_parallel"]
        kept.append(aside)
    assert [path.read_bytes() for path in kept] == list(DAMAGED.values()), "resets within one second keep every copy"
    assert states(lessons, work)[THIRD] == "kept"


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_stands_in_the_place_of_a_copy_stops_only_that_lesson(lessons, work, is_folder):
    place = (work / THIRD) if is_folder else (work / THIRD).parent
    place.mkdir(parents=True) if is_folder else (work.mkdir(), place.write_text("mine"))
    told = copies(lessons, work)
    assert (told[THIRD].state, " cannot be used: " in told[THIRD].message) == ("damaged", True)
    assert told["01_ranks/01_ranks.ipynb"].state == "made"
    assert is_folder or place.read_text() == "mine"


def test_what_cannot_be_is_refused(lessons, work):
    missing = "there is no lesson '17'; pass one of START, 01, 03"
    for number, told in (("17", missing), ("03", "nothing to reset: .*03_")):
        with pytest.raises(ValueError, match=told):
            reset(number, lessons, work)
    work.write_text("a file")
    for folder, told in ((lessons / "work", "inside the lessons"), (work, "is a file; pass --work")):
        with pytest.raises(ValueError, match=told):
            make_copies(lessons, folder)


def links(folder):
    """Yield each relative link of the notebooks of a folder: (notebook, the file that it leads to)."""
    for path in sorted(folder.rglob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
            yield from ((path.name, path.parent / link) for link in re.findall(r"\]\((\.\./[^)]+\.ipynb)\)", text))


def test_copies_link_to_the_map_and_to_each_other(tmp_path, monkeypatch):
    work = tmp_path / "work"
    number = len(make_copies(LESSONS, work)) - 2  # without START and GUIDES
    found = list(links(work))
    in_texts = sum(path.read_text("utf-8").count("/lesson.ipynb)") for path in LESSONS.glob("*/lesson.py"))
    assert len(found) == 2 * (3 * number - 2) + in_texts, "above and below: the map, the one before, the next"
    assert [link for link in (*found, *links(LESSONS)) if not link[1].is_file()] == []
    assert ("02_collectives.ipynb", work / "02_collectives/../03_data_parallel/03_data_parallel.ipynb") in found
    monkeypatch.chdir(work)
    html = course_map(LESSONS)._repr_html_()
    assert '<a href="03_data_parallel/03_data_parallel.ipynb">' in html
    assert all((work / link).is_file() for link in re.findall(r'href="([^"]+)"', html))
