"""The glossary: in the order of the alphabet; each word stands in the lesson that it names, which links to it."""

import json
import re
from pathlib import Path

import pytest

from distlab.course.notebook.learner.copies import make_copies

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
ENTRIES = re.findall(r"^### (.+)\n\nLesson ([\d, ]+)\. \S", (LESSONS / "GLOSSARY.md").read_text(), re.M)
LINK = re.compile(r"\]\(\.\./GLOSSARY\.md(?:#([^)]*))?\)")
LINKED = tuple(f"{number:02}" for number in range(1, 16))  # the lessons that link each of their words once


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


def test_entries_are_in_the_order_of_the_alphabet():
    words = [words for words, _ in ENTRIES]
    assert len(words) > 40
    assert words == sorted(words, key=str.lower)


@pytest.mark.parametrize(("words", "numbers"), ENTRIES, ids=[words for words, _ in ENTRIES])
def test_a_word_stands_in_the_lesson_that_the_glossary_names(words, numbers):
    for number in numbers.split(", "):
        for word in words.split(", "):
            assert re.sub(r"[\s_-]+", " ", word.lower()) in text_of(number), f"{word} is not in lesson {number}"


@pytest.mark.parametrize(
    ("words", "number"),
    [(words, number) for words, numbers in ENTRIES for number in numbers.split(", ") if number in LINKED],
)
def test_a_lesson_links_each_word_that_it_explains_once(words, number):
    (folder,) = LESSONS.glob(f"{number}_*")
    assert LINK.findall(markdown_of(folder / "lesson.ipynb")).count(anchor(words)) == 1


def test_links_to_the_glossary_resolve_where_the_learner_opens_the_lessons(tmp_path):
    make_copies(LESSONS, tmp_path)
    known = {anchor(words) for words, _ in ENTRIES}
    found = 0
    for notebook in tmp_path.glob("*/*.ipynb"):
        for words in LINK.findall(markdown_of(notebook)):
            assert words in known, f"{notebook.parent.name} links to {words!r}, which the glossary does not have"
            assert (notebook.parent / ".." / "GLOSSARY.md").is_file()
            found += 1
    assert found > 20


def test_the_map_leads_to_both_pages_where_the_learner_opens_it(tmp_path):
    make_copies(LESSONS, tmp_path)
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
