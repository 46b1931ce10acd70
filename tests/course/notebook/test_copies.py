"""Working copies: made once, never overwritten, put aside on request, whatever state they are in."""

import json
import os
import re
from pathlib import Path

import pytest

from distlab.course.notebook import course_map
from distlab.course.notebook.learner.copies import draw_map, fingerprint, make_copies, reset

LESSONS = Path(__file__).resolve().parents[3] / "lessons"


def notebook(*sources):
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": s, "outputs": [{"x": 1}], "execution_count": 7}
        for i, s in enumerate(sources)
    ]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


@pytest.fixture
def lessons(tmp_path):
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


def states(made):
    return {copy.name: copy.state for copy in made}


def text_of(path):
    return [cell["source"] for cell in json.loads(path.read_text())["cells"]]


def test_copies_are_made_once_without_results(lessons, work):
    first = make_copies(lessons, work)
    assert [copy.name for copy in first] == [
        "START.ipynb",
        "01_ranks/01_ranks.ipynb",
        "03_data_parallel/03_data_parallel.ipynb",
    ]
    assert set(states(first).values()) == {"made"}
    assert (work / ".distlab-work").exists()
    cell = json.loads((work / "03_data_parallel/03_data_parallel.ipynb").read_text())["cells"][0]
    assert (cell["source"], cell["outputs"], cell["execution_count"]) == ("first", [], None)
    assert set(states(make_copies(lessons, work)).values()) == {"kept"}


def test_what_you_wrote_is_kept_and_a_newer_lesson_is_told(lessons, work):
    make_copies(lessons, work)
    mine = work / "03_data_parallel" / "03_data_parallel.ipynb"
    own = json.loads(mine.read_text())
    own["cells"][0]["source"] = "my own words"
    mine.write_text(json.dumps(own))
    before = mine.read_bytes()
    assert states(make_copies(lessons, work))["03_data_parallel/03_data_parallel.ipynb"] == "kept"
    (lessons / "03_data_parallel" / "lesson.ipynb").write_text(notebook("better"))
    told = {copy.name: copy for copy in make_copies(lessons, work)}["03_data_parallel/03_data_parallel.ipynb"]
    assert told.state == "newer"
    assert "there is a newer version" in told.message
    assert "distlab lesson reset 03" in told.message
    assert mine.read_bytes() == before


def test_new_results_alone_make_no_newer_lesson(lessons, work):
    make_copies(lessons, work)
    original = lessons / "03_data_parallel" / "lesson.ipynb"
    changed = json.loads(original.read_text())
    changed["cells"][0]["outputs"] = [{"x": 2}]
    original.write_text(json.dumps(changed))
    assert states(make_copies(lessons, work))["03_data_parallel/03_data_parallel.ipynb"] == "kept"


def test_the_map_follows_the_course_unless_you_wrote_in_it(lessons, work):
    make_copies(lessons, work)
    (lessons / "START.ipynb").write_text(notebook("new map"))
    assert states(make_copies(lessons, work))["START.ipynb"] == "refreshed"
    assert text_of(work / "START.ipynb") == ["new map"]

    own = json.loads((work / "START.ipynb").read_text())
    own["cells"][0]["source"] = "my notes"
    (work / "START.ipynb").write_text(json.dumps(own))
    (lessons / "START.ipynb").write_text(notebook("newer map"))
    assert states(make_copies(lessons, work))["START.ipynb"] == "newer"
    assert text_of(work / "START.ipynb") == ["my notes"]


DAMAGED = {
    "cannot be used: Expecting value": b"",
    "cannot be used: Unterminated string": notebook("first").encode()[:40],
    "cannot be used: 'utf-8' codec can't decode byte 0xff": b'{"c\xff": 1}',
    "is JSON, but no notebook": b"[1, 2]",
    "is JSON, but no notebook of format 4": notebook("x").replace('"nbformat": 4', '"nbformat": 3').encode(),
}


@pytest.mark.parametrize("says", DAMAGED)
def test_a_damaged_copy_is_told_exactly_and_left_alone(lessons, work, says):
    make_copies(lessons, work)
    mine = work / "03_data_parallel" / "03_data_parallel.ipynb"
    mine.write_bytes(DAMAGED[says])
    told = {copy.name: copy for copy in make_copies(lessons, work)}["03_data_parallel/03_data_parallel.ipynb"]
    assert told.state == "damaged"
    assert says in told.message
    assert "distlab lesson reset 03" in told.message
    assert mine.read_bytes() == DAMAGED[says]

    aside, fresh = reset("3", lessons, work)
    assert aside.read_bytes() == DAMAGED[says]
    assert fresh == mine
    assert text_of(fresh) == ["first", "03_data_parallel"]


def folder_in_its_place(place):
    (place / "03_data_parallel.ipynb").mkdir(parents=True)


def file_in_the_folders_place(place):
    place.parent.mkdir(parents=True)
    place.write_text("mine")


def no_permission(place):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    place.mkdir(parents=True)
    place.chmod(0o500)


@pytest.mark.parametrize("block", [folder_in_its_place, file_in_the_folders_place, no_permission])
def test_what_stands_in_the_place_of_a_copy_stops_only_that_lesson(lessons, work, block):
    place = work / "03_data_parallel"
    block(place)
    told = {copy.name: copy for copy in make_copies(lessons, work)}
    found = told["03_data_parallel/03_data_parallel.ipynb"]
    assert (found.state, " cannot be used: " in found.message) == ("damaged", True)
    assert told["01_ranks/01_ranks.ipynb"].state == "made"
    assert not place.is_file() or place.read_text() == "mine"


def test_resets_within_one_second_keep_every_copy(lessons, work):
    make_copies(lessons, work)
    mine = work / "03_data_parallel" / "03_data_parallel.ipynb"
    kept = []
    for number in range(3):
        mine.write_text(notebook(f"attempt {number}"))
        aside, _ = reset("03", lessons, work)
        assert re.fullmatch(r"03_data_parallel\.\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d{6}\.ipynb", aside.name)
        kept.append(aside)
    assert [text_of(path) for path in kept] == [["attempt 0"], ["attempt 1"], ["attempt 2"]]
    assert states(make_copies(lessons, work))["03_data_parallel/03_data_parallel.ipynb"] == "kept"


def test_nothing_to_reset_and_no_such_lesson(lessons, work):
    with pytest.raises(ValueError, match="nothing to reset: .*03_data_parallel.ipynb is not there"):
        reset("03", lessons, work)
    with pytest.raises(ValueError, match="there is no lesson '17'; pass one of START, 01, 03"):
        reset("17", lessons, work)


def test_a_work_folder_that_cannot_be_one(lessons, work):
    work.write_text("a file")
    with pytest.raises(ValueError, match="is a file; pass --work"):
        make_copies(lessons, work)
    with pytest.raises(ValueError, match="inside the lessons"):
        make_copies(lessons, lessons / "work")


def links(folder):
    """Yield each relative link of the notebooks of a folder: (notebook, the file that it leads to)."""
    for path in sorted(folder.rglob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
            yield from ((path.name, path.parent / link) for link in re.findall(r"\]\((\.\./[^)]+\.ipynb)\)", text))


def test_copies_link_to_the_map_and_to_each_other(tmp_path, monkeypatch):
    work = tmp_path / "work"
    number = len(make_copies(LESSONS, work)) - 1  # without START
    found = list(links(work))
    in_texts = sum(path.read_text("utf-8").count("/lesson.ipynb)") for path in LESSONS.glob("*/lesson.py"))
    assert len(found) == 2 * (3 * number - 2) + in_texts, "above and below: the map, the one before, the next"
    assert [link for link in found if not link[1].is_file()] == []
    assert ("03_data_parallel.ipynb", work / "03_data_parallel/../04_large_batch/04_large_batch.ipynb") in found
    monkeypatch.chdir(work)
    html = course_map(LESSONS)._repr_html_()
    assert '<a href="03_data_parallel/03_data_parallel.ipynb">' in html
    assert all((work / link).is_file() for link in re.findall(r'href="([^"]+)"', html))


def test_the_repositorys_own_notebooks_link_to_each_other():
    assert [link for link in links(LESSONS) if not link[1].is_file()] == []


def test_a_copy_of_the_old_name_stays_and_is_linked_to(tmp_path, monkeypatch):
    work = tmp_path / "work"
    old = work / "03_data_parallel" / "lesson.ipynb"
    old.parent.mkdir(parents=True)
    old.write_text(notebook("mine"))
    before = old.read_bytes()
    made = states(make_copies(LESSONS, work))
    assert made["03_data_parallel/lesson.ipynb"] == "newer"
    assert "03_data_parallel/03_data_parallel.ipynb" not in made
    assert old.read_bytes() == before
    assert [link for link in links(work) if not link[1].is_file()] == []
    monkeypatch.chdir(work)
    assert '<a href="03_data_parallel/lesson.ipynb">' in course_map(LESSONS)._repr_html_()
    _, fresh = reset("03", LESSONS, work)
    assert fresh == old, "so that links to it stay right"
    assert set(states(make_copies(LESSONS, work)).values()) == {"kept"}


def test_the_map_stands_in_the_copy_of_start_before_anything_is_run(tmp_path):
    lessons, work = Path(__file__).resolve().parents[3] / "lessons", tmp_path / "work"
    make_copies(lessons, work)
    before = fingerprint(json.loads((work / "START.ipynb").read_text()))
    draw_map(lessons, work)
    notebook = json.loads((work / "START.ipynb").read_text())
    (shown,) = [cell["outputs"] for cell in notebook["cells"] if "course_map()" in "".join(cell["source"])]
    assert "09 Pipeline" in shown[0]["data"]["text/html"]
    assert "12" in shown[0]["data"]["text/plain"]
    assert fingerprint(notebook) == before, "START is still the learner's untouched copy"
