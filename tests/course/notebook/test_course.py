"""What learners see of their progress: the map, the page to print, hints one by one, the solution after trying."""

import html
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from distlab.cli import main
from distlab.course.grading import Lesson, Report, load_lesson, progress, reference_of
from distlab.course.grading.progress import FILE, MARKER, OUTSIDE, Entry, Record, keep, record_of
from distlab.course.notebook import course_map, hint, progress_page, solution
from distlab.course.notebook.course import PAGE, CourseMap, CourseRow, page, rows

LESSONS = Path(__file__).resolve().parents[3] / "lessons"


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
    progress = {"01.a": Entry(1, "2026-01-01"), "01.b": Entry(3), "09.z": Entry(1, "2026-01-01")}
    first, second = rows(lessons, progress)
    assert (first.title, first.minutes, first.passed, first.progress) == ("First", 45, 1, "1 of 3")
    assert (second.title, second.ready, second.progress) == ("Second one", False, "to come")
    table = CourseMap([first, second], "This machine.")
    assert table.summary == "1 of 3 exercises passed. Next: 01 First."
    shown = table._repr_html_()
    assert '<a href="01_first/lesson.ipynb">01 First</a>' in shown
    assert "send &lt;bytes&gt;" in shown
    assert 'href="02_second_one' not in shown


def test_the_command_line_reads_progress_from_the_work_folder(lessons, tmp_path):
    assert "0 of 3 exercises passed" in str(course_map(lessons, tmp_path / "none"))
    entry = asdict(Entry(1, "x"))
    assert "1 of 3 exercises passed" in str(course_map(lessons, work_with(tmp_path, {"01.c": entry})))
    entry |= {"first_passed": "", "solution_seen": "x"}
    assert "0 of 3; solution seen: 01.c" in str(course_map(lessons, work_with(tmp_path, {"01.c": entry})))


def test_every_lesson_of_the_course_is_on_the_map():
    text = str(course_map(LESSONS))
    assert [line[:2] for line in text.splitlines() if line[:2].isdigit()] == [f"{n:02}" for n in range(1, 16)]
    folders = {path.name for path in LESSONS.glob("[0-9][0-9]_*") if (path / "lesson.py").is_file()}
    assert folders <= {row.folder for row in rows(LESSONS, {})}


ROWS = [
    CourseRow("01", "01_first", "First <steps>", "go", ready=True, exercises=("01.a", "01.b"), passed=1),
    CourseRow("02", "02_second", "Second", "go on", ready=True, exercises=("02.a",)),
]
PASSED = Entry(3, "2026-01-02T03:04:05+00:00", ("8 bytes < 9", "2 steps"), failed=2, hints=1)


def work_with(tmp_path, entries):
    (tmp_path / MARKER).touch()
    (tmp_path / FILE).write_text(json.dumps({"schema": 1, "exercises": entries}))
    return tmp_path


def test_the_page_says_what_was_passed_when_and_with_what_help():
    seen = Entry(4, failed=4, hints=3, solution_seen="2026-01-03")
    text = page(ROWS, {"01.a": PASSED, "01.b": seen}, day="2026-02-03")
    for tag in ("table", "tr", "td", "th", "section", "p", "body"):
        assert len(re.findall(rf"<{tag}\b", text)) == text.count(f"</{tag}>"), tag
    cells = [html.unescape(cell) for cell in re.split("<[^>]+>", text)]
    assert {"01.a", "2026-01-02", "3, 2 wrong", "1 hint", "8 bytes < 9; 2 steps"} <= set(cells)
    assert {"01.b", "not yet", "4, 4 wrong", "3 hints, solution seen"} <= set(cells)
    assert {"01 First <steps>: 1 of 2", "Not begun: 02 Second"} <= set(cells)  # the second is among those not begun
    assert "1 of 3 exercises passed. Next: 01 First <steps>. Lessons with all exercises passed: 0 of 2." in cells
    assert "2026-02-03" in text
    assert not re.search("http|<script", text), "it loads nothing"


def test_the_page_is_written_anew_by_the_command_and_by_start_and_nothing_outside(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (repr(progress_page()), list(tmp_path.iterdir())) == (OUTSIDE, [])
    work = work_with(tmp_path, {})
    assert f'href="{PAGE}"' in progress_page()._repr_html_()
    before = (work / PAGE).read_text()
    work_with(tmp_path, {"01.shift": asdict(Entry(1, "2026-01-02"))})
    assert main(["lesson", "page", "--work", str(work)]) == 0
    assert PAGE in capsys.readouterr().out
    assert "01.shift" not in before
    assert "01.shift" in (work / PAGE).read_text()
    assert "progress_page()" in (LESSONS / "START.ipynb").read_text()


NAME = "03.flat"
SECRET = "torch.cat("  # stands in the reference, and not in a hint


@pytest.fixture(scope="module")
def lesson() -> Lesson:
    return load_lesson("03", Path(__file__).resolve().parents[3] / "lessons")


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "_remembered", Record())
    return tmp_path


@pytest.fixture
def work(outside: Path) -> Path:
    (outside / MARKER).touch()
    return outside


def checked(lesson: Lesson, verdict: str) -> None:
    """Keep what a check of NAME found, without its ranks."""
    exercise = lesson.exercise(NAME)
    keep(Report(exercise, verdict, None, "", (), (1,), 0.1, None, reference_of(exercise)))


def test_hints_come_one_by_one_and_are_noted(work, lesson):
    hints = lesson.exercise(NAME).hints
    assert repr(hint(NAME)) == f"Hint 1 of 3: {hints[0]}"
    second = hint(NAME)
    assert all(words in repr(second) for words in hints[:2])
    assert hints[2] not in repr(second)
    assert second._repr_markdown_().startswith("**Hint 1 of 3:** ")
    for _ in range(2):
        assert all(words in repr(hint(NAME)) for words in hints)
    assert (record_of().exercises[NAME].hints, record_of().exercises[NAME].attempts) == (3, 0)


def test_the_solution_says_in_one_line_what_is_missing_and_is_shown_and_noted(work, lesson):
    function = lesson.exercise(NAME).function
    check_it, next_hint = (
        f'check("{NAME}", {function}) checks your function',
        f'hint("{NAME}") shows and counts the next hint',
    )
    nothing = f"solution: 0 of 3 failed checks, 0 of 3 hints seen so far; {check_it} and {next_hint}"
    assert repr(solution(NAME)) == nothing
    checked(lesson, "not attempted")
    assert repr(solution(NAME)) == nothing
    checked(lesson, "wrong")
    for _ in range(3):
        hint(NAME)
    assert repr(solution(NAME)) == f"solution: 1 of 3 failed checks, 3 of 3 hints seen so far; {check_it}"
    checked(lesson, "wrong")
    checked(lesson, "wrong")
    assert record_of().exercises[NAME].solution_seen == ""
    shown = solution(NAME)
    assert repr(shown).startswith(f"The solution of {NAME}:")
    assert "white-space:pre;overflow-x:auto" in shown._repr_html_(), "a long line scrolls, no word is broken"
    assert hint(NAME)._repr_html_() is None
    exercise = lesson.exercise(NAME)
    for text in (repr(shown), shown._repr_markdown_()):
        assert f"def {exercise.function}(" in text
        assert SECRET in text
        assert all(line in text for line in exercise.imports)
    assert "```python\n" in shown._repr_markdown_()
    first = record_of().exercises[NAME]
    assert first.solution_seen
    assert not first.passed
    solution(NAME)
    assert record_of().exercises[NAME] == first
    checked(lesson, "passed")
    entry = record_of().exercises[NAME]
    assert entry.passed
    assert entry.solution_seen == first.solution_seen


def test_a_right_answer_and_a_kernel_outside_a_work_folder_are_shown_it_too(outside, lesson):
    for _ in range(3):
        checked(lesson, "wrong")
        hint(NAME)
    assert SECRET in repr(solution(NAME))
    assert list(outside.iterdir()) == []
    (outside / MARKER).touch()
    checked(lesson, "passed")
    assert SECRET in repr(solution(NAME))
    assert record_of().exercises[NAME].solution_seen == "", "not noted"
    (outside / FILE).write_text("{")
    assert "progress.json could not be read" in repr(hint(NAME))


def test_the_third_wrong_answer_names_hints_and_solution_once(outside, lesson):
    exercise = lesson.exercise(NAME)
    wrong = Report(exercise, "wrong", "x", "", (), (1,), 0.1, None, reference_of(exercise))
    sentence = f'Stuck? In the notebook, hint("{NAME}") shows a hint, and after all hints solution("{NAME}")'
    told = [keep(wrong) for _ in range(4)]
    assert [words.startswith(sentence) for words in told] == [False, False, True, False]
    assert told[2].endswith(OUTSIDE)
    checked(lesson, "passed")
    assert keep(wrong) == OUTSIDE
    (outside / MARKER).touch()
    assert [keep(wrong) for _ in range(4)] == ["", "", f"{sentence} shows the solution.", ""]
