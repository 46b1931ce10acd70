"""The glossary: in the order of the alphabet; each word stands in the lesson that it names, which links to it."""

import functools
import json
import re
from pathlib import Path

import pytest

from distlab.course.notebook.course import make_copies

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
ENTRIES = re.findall(r"^### (.+)\n\nLesson ([\d, ]+)\. \S", (LESSONS / "GLOSSARY.md").read_text(), re.M)
LINK = re.compile(r"\]\(\.\./GLOSSARY\.md(?:#([^)]*))?\)")
LESSON_NOTEBOOKS = {path.parent.name[:2]: path for path in LESSONS.glob("[0-9][0-9]_*/lesson.ipynb")}


@functools.cache
def text_of(number):
    (folder,) = LESSONS.glob(f"{number}_*")
    text = (folder / "lesson.py").read_text().replace("\n# ", " ").lower()
    return re.sub(r"[\s_-]+", " ", text)


def anchor(words):
    """The anchor that a heading gets, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-")


def markdown_of(path):
    """The text cells of a notebook, without the code that stands in them, in their order."""
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def test_entries_stand_in_order_and_in_the_lesson_that_the_glossary_names():
    entries = [words for words, _ in ENTRIES]
    assert len(entries) > 40
    assert entries == sorted(entries, key=str.lower)
    linked = {number: LINK.findall(markdown_of(path)) for number, path in LESSON_NOTEBOOKS.items()}
    for words, number in ((words, number) for words, numbers in ENTRIES for number in numbers.split(", ")):
        for word in words.split(", "):
            assert re.sub(r"[\s_-]+", " ", word.lower()) in text_of(number), f"{word} is not in lesson {number}"
        assert linked[number].count(anchor(words)) == 1, f"lesson {number} links {words!r} once, where it explains it"


def test_links_resolve_where_the_learner_opens_the_lessons(tmp_path):
    make_copies(LESSONS, tmp_path)
    known = {anchor(words) for words, _ in ENTRIES}
    found = [(path, words) for path in tmp_path.glob("*/*.ipynb") for words in LINK.findall(markdown_of(path))]
    assert len(found) > 20
    assert [pair for pair in found if pair[1] not in known or not (pair[0].parents[1] / "GLOSSARY.md").is_file()] == []
    pages = re.findall(r"\]\((\w+\.md)\)", markdown_of(tmp_path / "START.ipynb"))
    assert pages == ["GLOSSARY.md", "CHEATSHEET.md"]
    assert all((tmp_path / page).is_file() for page in pages)


@pytest.mark.parametrize("page", ["GLOSSARY.md", "CHEATSHEET.md"])
def test_an_older_page_is_replaced_unless_the_learner_wrote_in_it(tmp_path, page):
    lessons, copy = tmp_path / "lessons", tmp_path / "work" / page
    lessons.mkdir()
    for text in ("first", "second"):
        (lessons / page).write_text(text)
        make_copies(lessons, tmp_path / "work")
        assert copy.read_text() == text
    copy.write_text("second, and a note of mine")
    (lessons / page).write_text("third")
    make_copies(lessons, tmp_path / "work")
    assert copy.read_text() == "second, and a note of mine"
