"""The website's pages of faults have every wrong version, with the words that are kept of it."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest
from fault_table import kept_words, markdown

ROOT = Path(__file__).resolve().parents[2]


def test_each_wrong_version_is_on_its_lessons_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    faults, words = importlib.import_module("site_build.faults"), kept_words()
    pages = faults.pages(ROOT)
    for number, count in Counter(exercise[:2] for exercise, _ in words).items():
        assert sum(line.startswith(f"| {number}.") for line in pages[number].splitlines()) == count
    for (exercise, name), said in words.items():
        assert f"| {exercise} | {markdown(name)} |" in pages[exercise[:2]]
        assert f" | {markdown(said)} | " in pages[exercise[:2]]
    assert set(pages) == {exercise[:2] for exercise, _ in words} | {"checks", "index"}
    assert all(f"\n{name}\n" in pages["index"] for name in set(pages) - {"index"})
    monkeypatch.setenv("DISTLAB_DOCS_LESSONS", "09_*")  # a short build
    pages = faults.pages(ROOT)
    assert set(pages) == {"09", "checks", "index"}
    rows = [line for line in pages["checks"].splitlines() if line.startswith(("| 0", "| 1"))]
    assert {line[2:4] for line in rows} == {"09"}
