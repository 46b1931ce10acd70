"""The map of the course, and the notes of progress that it shows."""

import json
from pathlib import Path

import pytest

from distlab.grading.progress import MARKER, Entry
from distlab.notebook import course_map
from distlab.notebook.learner.course import CourseMap, rows, text_table

LESSONS = Path(__file__).resolve().parents[2] / "lessons"


@pytest.fixture
def lessons(tmp_path):
    folder = tmp_path / "lessons"
    (folder / "01_first").mkdir(parents=True)
    (folder / "COURSE.toml").write_text(
        '[[lesson]]\nfolder = "01_first"\ncan = "send <bytes>"\n[[lesson]]\nfolder = "02_second_one"\ncan = "more"\n'
    )
    facts = {"title": "First", "minutes": 45, "needs": [], "exercises": ["01.a", "01.b", "01.c"]}
    (folder / "01_first" / "lesson.ipynb").write_text(json.dumps({"cells": [], "metadata": {"distlab": facts}}))
    return folder


def test_what_is_passed_and_what_is_to_come(lessons):
    progress = {"01.a": Entry(1, "2026-01-01", "2026-01-01"), "01.b": Entry(3), "09.z": Entry(1, "2026-01-01")}
    first, second = rows(lessons, progress)
    assert (first.title, first.minutes, first.passed, first.progress) == ("First", 45, 1, "1 of 3")
    assert (second.title, second.ready, second.progress) == ("Second one", False, "to come")
    table = CourseMap([first, second], "This machine.")
    assert table.summary == "1 of 3 exercises passed. Next: 01 First."
    html = table._repr_html_()
    assert '<a href="01_first/lesson.ipynb">01 First</a>' in html
    assert "send &lt;bytes&gt;" in html
    assert 'href="02_second_one' not in html


def test_a_solution_that_was_seen_is_said(lessons):
    progress = {
        "01.a": Entry(5, "2026-01-01", "2026-01-01", solution_seen="2026-01-01"),
        "01.b": Entry(1, "2026-01-01"),
    }
    first, second = rows(lessons, progress)
    assert first.progress == "2 of 3; solution seen: 01.a"
    table = CourseMap([first, second], "This machine.")
    assert "2 of 3; solution seen: 01.a" in str(table)
    assert "2 of 3; solution seen: 01.a" in table._repr_html_()


def test_the_command_line_reads_progress_from_the_work_folder(lessons, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    assert "0 of 3 exercises passed" in text_table(lessons, work)
    (work / MARKER).touch()
    entry = {"attempts": 1, "first_passed": "x", "last_passed": "x", "budget": [], "seconds": 0.1}
    (work / "progress.json").write_text(json.dumps({"schema": 1, "exercises": {"01.c": entry}}))
    assert "1 of 3 exercises passed" in text_table(lessons, work)
    entry |= {"first_passed": "", "solution_seen": "x"}
    (work / "progress.json").write_text(json.dumps({"schema": 1, "exercises": {"01.c": entry}}))
    assert "0 of 3; solution seen: 01.c" in text_table(lessons, work)


def test_every_lesson_of_the_course_is_on_the_map():
    text = str(course_map(LESSONS))
    assert [line[:2] for line in text.splitlines() if line[:2].isdigit()] == [f"{n:02}" for n in range(1, 16)]
    folders = {path.name for path in LESSONS.glob("[0-9][0-9]_*") if (path / "lesson.py").is_file()}
    assert folders <= {row.folder for row in rows(LESSONS, {})}
