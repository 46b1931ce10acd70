"""The glossary: in the order of the alphabet, and each word stands in the lesson that it names."""

import re
from pathlib import Path

import pytest

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
ENTRIES = re.findall(r"^\*\*(.+?)\*\* \(([\d, ]+)\): \S", (LESSONS / "GLOSSARY.md").read_text(), re.M)


def text_of(number):
    (folder,) = LESSONS.glob(f"{number}_*")
    text = (folder / "lesson.py").read_text().replace("\n# ", " ").lower()
    return re.sub(r"[\s_-]+", " ", text)


def test_entries_are_in_the_order_of_the_alphabet():
    words = [words for words, _ in ENTRIES]
    assert len(words) > 40
    assert words == sorted(words, key=str.lower)


@pytest.mark.parametrize(("words", "numbers"), ENTRIES, ids=[words for words, _ in ENTRIES])
def test_a_word_stands_in_the_lesson_that_the_glossary_names(words, numbers):
    for number in numbers.split(", "):
        for word in words.split(", "):
            assert re.sub(r"[\s_-]+", " ", word.lower()) in text_of(number), f"{word} is not in lesson {number}"
