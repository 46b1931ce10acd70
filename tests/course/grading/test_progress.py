"""Progress is kept whatever happens to its file, and two notebooks at once lose nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from distlab.course.grading import Lesson, Report, reference_of
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
    assert keep(report(lesson, "wrong"), here) == ""
    assert not load_progress(here)["91.mean"].passed
    assert keep(report(lesson), here) == ""
    first = load_progress(here)["91.mean"]
    assert first.passed
    assert (first.attempts, first.budget, first.seconds) == (2, ("one",), 0.25)
    assert first.first_passed == first.last_passed
    keep(report(lesson, budget=("two",)), here)
    keep(report(lesson, "wrong"), here)
    again = load_progress(here)["91.mean"]
    assert again.passed
    assert (again.attempts, again.first_passed, again.budget) == (4, first.first_passed, ("two",))
    keep(report(lesson, name="91.double"), here)
    assert set(load_progress(here)) == {"91.mean", "91.double"}


def test_wrong_answers_are_counted(work: Path, lesson: Lesson) -> None:
    for verdict in ("wrong", "not attempted", "wrong", "passed", "wrong"):
        keep(report(lesson, verdict), work)
    entry = load_progress(work)["91.mean"]
    assert (entry.attempts, entry.failed) == (4, 3)


def test_predictions_and_answers_are_kept_in_one_file(work: Path, lesson: Lesson) -> None:
    assert prediction_of("How long? (ms)", work) is None
    assert keep_prediction("How long? (ms)", 200.0, work / "91_trial") == ""
    keep(report(lesson), work)
    keep_prediction("How many?", 3.0, work)
    assert prediction_of("How long? (ms)", work) == 200.0
    assert load_progress(work)["91.mean"].passed
    data = json.loads((work / FILE).read_text())
    assert data["predictions"] == {"How long? (ms)": 200.0, "How many?": 3.0}


@pytest.mark.parametrize("verdict", ["not attempted", "blocked"])
def test_what_is_no_attempt_is_not_kept(work: Path, lesson: Lesson, verdict: str) -> None:
    assert keep(report(lesson, verdict), work) == ""
    assert not (work / FILE).exists()


def test_outside_a_work_folder_nothing_is_kept(tmp_path: Path, lesson: Lesson) -> None:
    assert keep(report(lesson), tmp_path) == OUTSIDE
    assert load_progress(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


DAMAGED = [
    b"",
    b"{",
    b"\xff\xfe\x00",
    b"[]",
    b'{"schema": 1}',
    b'{"schema": 2, "exercises": {}}',
    b'{"schema": 1, "exercises": {"91.mean": 3}}',
    b'{"schema": 1, "exercises": {"91.mean": {"attempts": "many"}}}',
    b'{"schema": 1, "exercises": {}, "predictions": {"How long?": "soon"}}',
    b'{"schema": 1, "exercises": {}, "predictions": {"How long?": 1e999}}',
    b'{"schema": 1, "exercises": {}, "predictions": []}',
    b'{"schema": 1, "exercises": {"91.mean": {"attempts": 1, "first_passed": "", "last_passed": "", "budget": [], '
    b'"seconds": 0, "hints": "two"}}}',
]


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_file_is_moved_aside_and_told(work: Path, lesson: Lesson, data: bytes) -> None:
    (work / FILE).write_bytes(data)
    assert load_progress(work) == {}
    told = keep(report(lesson), work)
    assert "could not be read" in told
    aside = [path for path in work.iterdir() if path.name.startswith("progress.damaged-")]
    assert len(aside) == 1
    assert aside[0].name in told
    assert aside[0].read_bytes() == data
    assert load_progress(work)["91.mean"].passed


def test_a_folder_in_the_files_place(work: Path, lesson: Lesson) -> None:
    (work / FILE).mkdir()
    assert "could not be read" in keep(report(lesson), work)
    assert load_progress(work)["91.mean"].passed


def test_a_folder_that_cannot_be_written(work: Path, lesson: Lesson, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    keep(report(lesson), work)
    before = (work / FILE).read_bytes()
    monkeypatch.setattr("os.fsync", full)
    assert (
        keep(report(lesson), work)
        == f"Your progress is not kept: {work / FILE} cannot be written (No space left on device)."
    )
    assert (work / FILE).read_bytes() == before
    assert {path.name for path in work.iterdir()} == {MARKER, FILE, "91_trial"}


def _keep_often(folder: Path, lessons: Path, times: int) -> None:
    from distlab.course.grading import load_lesson

    lesson = load_lesson("91", lessons)
    for _ in range(times):
        keep(report(lesson), folder)


def test_two_notebooks_at_once_lose_nothing(work: Path, lesson: Lesson) -> None:
    context = multiprocessing.get_context("fork")
    several = [context.Process(target=_keep_often, args=(work, lesson.folder.parent, 25)) for _ in range(4)]
    for process in several:
        process.start()
    for process in several:
        process.join(60)
    assert [process.exitcode for process in several] == [0] * 4
    assert load_progress(work)["91.mean"].attempts == 100
    assert {path.name for path in work.iterdir()} == {MARKER, FILE, "91_trial"}


def test_the_file_is_plain_json(work: Path, lesson: Lesson) -> None:
    keep(report(lesson), work)
    data = json.loads((work / FILE).read_text())
    assert data["schema"] == 1
    names = {"attempts", "first_passed", "last_passed", "budget", "seconds", "failed", "hints", "solution_seen"}
    assert set(data["exercises"]["91.mean"]) == names
    assert data["predictions"] == {}
    assert os.stat(work / FILE).st_size < 1000
