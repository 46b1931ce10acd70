"""Progress is kept whatever happens to its file, and two notebooks at once lose nothing."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from distlab.course.grading import Lesson, Report, load_lesson, reference_of
from distlab.course.grading.progress import (
    FILE,
    MARKER,
    OUTSIDE,
    keep,
    keep_prediction,
    load_progress,
    prediction_of,
    work_folder,
)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / MARKER).touch()
    (tmp_path / "91_trial").mkdir()
    return tmp_path


def report(
    lesson: Lesson, verdict: str = "passed", name: str = "91.mean", budget: tuple[str, ...] = ("one",)
) -> Report:
    exercise = lesson.exercise(name)
    return Report(exercise, verdict, None, "", budget, (1,), 0.25, None, reference_of(exercise))


def test_what_is_kept(work: Path, lesson: Lesson) -> None:
    here = work / "91_trial"
    assert work_folder(here) == work
    for verdict in ("not attempted", "blocked"):
        assert keep(report(lesson, verdict), here) == ""
    assert not (work / FILE).exists()
    assert prediction_of("How long? (ms)", work) is None
    assert keep_prediction("How long? (ms)", 200.0, here) == ""
    assert keep(report(lesson, "wrong"), here) == ""
    assert not load_progress(here)["91.mean"].passed
    assert keep(report(lesson), here) == ""
    first = load_progress(here)["91.mean"]
    assert (first.passed, first.attempts, first.budget, first.seconds) == (True, 2, ("one",), 0.25)
    assert first.first_passed == first.last_passed
    keep(report(lesson, budget=("two",)), here)
    keep(report(lesson, "wrong"), here)
    again = load_progress(here)["91.mean"]
    assert (again.passed, again.attempts, again.failed) == (True, 4, 2)
    assert (again.first_passed, again.budget) == (first.first_passed, ("two",))
    keep(report(lesson, name="91.double"), here)
    assert prediction_of("How long? (ms)", work) == 200.0
    data = json.loads((work / FILE).read_text())
    assert (data["schema"], set(data["exercises"])) == (1, {"91.mean", "91.double"})
    names = {"attempts", "first_passed", "last_passed", "budget", "seconds", "failed", "hints", "solution_seen"}
    assert set(data["exercises"]["91.mean"]) == names
    assert data["predictions"] == {"How long? (ms)": 200.0}


def test_outside_a_work_folder_nothing_is_kept(tmp_path: Path, lesson: Lesson) -> None:
    assert keep(report(lesson), tmp_path) == OUTSIDE
    assert load_progress(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


ENTRY = '{"attempts": 1, "first_passed": "", "last_passed": "", "budget": [], "seconds": 0, "hints": "two"}'
DAMAGED = ["", "{", "\0", "[]", '{"schema": 1}', '{"schema": 2, "exercises": {}}']
DAMAGED += [f'{{"schema": 1, "exercises": {{"91.mean": {entry}}}}}' for entry in ("3", '{"attempts": "many"}', ENTRY)]
DAMAGED += [
    f'{{"schema": 1, "exercises": {{}}, "predictions": {found}}}'
    for found in ('{"How": "soon"}', '{"How": 1e999}', "[]")
]


def test_a_damaged_file_is_moved_aside_and_told(tmp_path: Path, lesson: Lesson) -> None:
    for number, text in enumerate([*DAMAGED, None]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / MARKER).touch()
        (folder / FILE).mkdir() if text is None else (folder / FILE).write_text(text)  # or a folder in its place
        assert load_progress(folder) == {}
        told = keep(report(lesson), folder)
        assert "could not be read" in told, text
        (aside,) = folder.glob("progress.damaged-*")
        assert aside.name in told
        assert text is None or aside.read_text() == text
        assert load_progress(folder)["91.mean"].passed


def test_a_folder_that_cannot_be_written(work: Path, lesson: Lesson, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    keep(report(lesson), work)
    before = (work / FILE).read_bytes()
    monkeypatch.setattr("os.fsync", full)
    said = f"Your progress is not kept: {work / FILE} cannot be written (No space left on device)."
    assert keep(report(lesson), work) == said
    assert (work / FILE).read_bytes() == before
    assert {path.name for path in work.iterdir()} == {MARKER, FILE, "91_trial"}


def keep_often(folder: Path, lessons: Path, times: int) -> None:
    lesson = load_lesson("91", lessons)
    for _ in range(times):
        keep(report(lesson), folder)


def test_two_notebooks_at_once_lose_nothing(work: Path, lesson: Lesson) -> None:
    context = multiprocessing.get_context("fork")
    several = [context.Process(target=keep_often, args=(work, lesson.folder.parent, 25)) for _ in range(4)]
    for process in several:
        process.start()
    for process in several:
        process.join(60)
    assert [process.exitcode for process in several] == [0] * 4
    assert load_progress(work)["91.mean"].attempts == 100
    assert {path.name for path in work.iterdir()} == {MARKER, FILE, "91_trial"}
