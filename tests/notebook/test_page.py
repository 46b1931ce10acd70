"""The page of progress to print: what it says, where it is written, and who asks for it."""

import html.parser
import json
from pathlib import Path

from distlab.cli import main
from distlab.grading.progress import FILE, MARKER, OUTSIDE, Entry
from distlab.notebook import progress_page
from distlab.notebook.learner.course import Row
from distlab.notebook.learner.page import PAGE, page

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
ROWS = [
    Row("01", "01_first", "First <steps>", "go", ready=True, exercises=("01.a", "01.b"), passed=1),
    Row("02", "02_second", "Second", "go on", ready=True, exercises=("02.a",)),
]
PASSED = Entry(3, "2026-01-02T03:04:05+00:00", "2026-01-02T03:04:05+00:00", ("8 bytes < 9", "2 steps"), 1.0, 2, 1)


class Cells(html.parser.HTMLParser):
    """The texts of a page, and the tags that are open: all must be closed."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open += [tag] if tag != "meta" else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts += [data] if self.open and self.open[-1] not in ("style", "title") else []


def work_with(tmp_path, entries):
    (tmp_path / MARKER).touch()
    (tmp_path / FILE).write_text(json.dumps({"schema": 1, "exercises": entries}))
    return tmp_path


def test_the_page_says_what_was_passed_when_and_with_what_help():
    seen = Entry(4, failed=4, hints=3, solution_seen="2026-01-03")
    cells = Cells(page(ROWS, {"01.a": PASSED, "01.b": seen}, day="2026-02-03"))
    assert cells.open == []
    assert {"01.a", "2026-01-02", "3, 2 wrong", "1 hint", "8 bytes < 9; 2 steps"} <= set(cells.texts)
    assert {"01.b", "not yet", "4, 4 wrong", "3 hints, solution seen"} <= set(cells.texts)
    assert "01 First <steps>: 1 of 2" in cells.texts
    assert "02 Second" in cells.texts  # among the lessons that are not begun
    assert "1 of 3 exercises passed. Next: 01 First <steps>. Lessons with all exercises passed: 0 of 2." in cells.texts
    assert any("2026-02-03" in text for text in cells.texts)


def test_a_whole_course_has_nothing_ahead():
    row = Row("01", "01_first", "First", "go", ready=True, exercises=("01.a",), passed=1)
    text = page([row], {"01.a": PASSED}, day="2026-02-03")
    assert "1 of 1 exercises passed. Lessons with all exercises passed: 1 of 1." in text
    assert "Not begun" not in text


def test_the_command_writes_the_page_anew(tmp_path, capsys):
    work = work_with(tmp_path, {})
    assert main(["lesson", "page", "--work", str(work)]) == 0
    before = (work / PAGE).read_text()
    passed = {"attempts": 1, "first_passed": "2026-01-02", "last_passed": "2026-01-02", "budget": [], "seconds": 0.1}
    work_with(tmp_path, {"01.shift": passed})
    assert main(["lesson", "page", "--work", str(work)]) == 0
    assert PAGE in capsys.readouterr().out
    assert "01.shift" not in before
    assert "01.shift" in (work / PAGE).read_text()
    assert [path.name for path in work.iterdir() if path.suffix == ".part"] == []


def test_the_command_refuses_a_folder_without_working_copies(tmp_path, capsys):
    assert main(["lesson", "page", "--work", str(tmp_path / "none")]) == 2
    assert "has no working copies" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_start_asks_for_the_page_and_links_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(work_with(tmp_path, {}))
    assert f'href="{PAGE}"' in progress_page()._repr_html_()
    assert (tmp_path / PAGE).is_file()
    assert "progress_page()" in (LESSONS / "START.ipynb").read_text()


def test_outside_a_folder_of_working_copies_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = progress_page()
    assert repr(shown) == OUTSIDE
    assert list(tmp_path.iterdir()) == []


def test_the_page_loads_nothing():
    text = page(ROWS, {"01.a": PASSED}, day="2026-02-03")
    assert "http" not in text
    assert "<script" not in text
