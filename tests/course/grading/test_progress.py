"""Progress is kept whatever happens to its file, and two notebooks at once lose nothing."""

import json
import multiprocessing

import pytest

from distlab.course.grading import Report, load_lesson, progress, reference_of


@pytest.fixture
def work(tmp_path):
    (tmp_path / progress.MARKER).touch()
    (tmp_path / "91_trial").mkdir()
    return tmp_path


def report(lesson, verdict="passed", name="91.mean", budget=("one",)):
    exercise = lesson.exercise(name)
    return Report(exercise, verdict, None, "", budget, (1,), 0.25, None, reference_of(exercise))


def test_what_is_kept(work, lesson):
    here = work / "91_trial"
    assert progress.work_folder(here) == work
    for verdict in ("not attempted", "blocked"):
        assert progress.keep(report(lesson, verdict), here) == ""
    assert not (work / progress.FILE).exists()
    assert progress.record_of(work).predictions == {}
    assert progress.keep_prediction("How long? (ms)", 200.0, here) == ""
    assert progress.keep(report(lesson, "wrong"), here) == ""
    assert not progress.record_of(here).exercises["91.mean"].passed
    assert progress.keep(report(lesson), here) == ""
    first = progress.record_of(here).exercises["91.mean"]
    assert (first.passed, first.attempts, first.budget) == (True, 2, ("one",))
    progress.keep(report(lesson, budget=("two",)), here)
    progress.keep(report(lesson, "wrong"), here)
    again = progress.record_of(here).exercises["91.mean"]
    assert (again.passed, again.attempts, again.failed) == (True, 4, 2)
    assert (again.first_passed, again.budget) == (first.first_passed, ("two",))
    progress.keep(report(lesson, name="91.double"), here)
    assert progress.record_of(work).predictions == {"How long? (ms)": 200.0}
    data = json.loads((work / progress.FILE).read_text())
    assert (data["schema"], set(data["exercises"])) == (1, {"91.mean", "91.double"})
    names = {"attempts", "first_passed", "budget", "failed", "hints", "solution_seen"}
    assert (set(data["exercises"]["91.mean"]), data["predictions"]) == (names, {"How long? (ms)": 200.0})


ENTRY = '{"attempts": 1, "first_passed": "", "budget": [], "hints": "two"}'
DAMAGED = ["", "{", "\0", "[]", '{"schema": 1}', '{"schema": 2, "exercises": {}}']
DAMAGED += [f'{{"schema": 1, "exercises": {{"91.mean": {entry}}}}}' for entry in ("3", '{"attempts": "many"}', ENTRY)]
DAMAGED += [
    f'{{"schema": 1, "exercises": {{}}, "{name}": {found}}}'
    for name, found in (("predictions", '{"How": "soon"}'), ("predictions", '{"How": 1e999}'), ("measured", "[]"))
]


def test_a_damaged_file_is_moved_aside_and_told(tmp_path, lesson):
    for number, text in enumerate([*DAMAGED, None]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / progress.MARKER).touch()
        (folder / progress.FILE).mkdir() if text is None else (folder / progress.FILE).write_text(
            text
        )  # or a folder in its place
        assert progress.record_of(folder).exercises == {}
        told = progress.keep(report(lesson), folder)
        assert "could not be read" in told, text
        (aside,) = folder.glob("progress.damaged-*")
        assert aside.name in told
        assert text is None or aside.read_text() == text
        assert progress.record_of(folder).exercises["91.mean"].passed


def test_a_folder_that_cannot_be_written(work, lesson, monkeypatch):
    def full(*args, **named):
        raise OSError(28, "No space left on device")

    progress.keep(report(lesson), work)
    before = (work / progress.FILE).read_bytes()
    monkeypatch.setattr("os.fsync", full)
    said = f"Your progress is not kept: {work / progress.FILE} cannot be written (No space left on device)."
    assert (progress.keep(report(lesson), work), (work / progress.FILE).read_bytes()) == (said, before)
    assert {path.name for path in work.iterdir()} == {progress.MARKER, progress.FILE, "91_trial"}


def keep_often(folder, lessons, times):
    lesson = load_lesson("91", lessons)
    for _ in range(times):
        progress.keep(report(lesson), folder)


def test_two_notebooks_at_once_lose_nothing(work, lesson):
    context = multiprocessing.get_context("fork")
    several = [context.Process(target=keep_often, args=(work, lesson.folder.parent, 25)) for _ in range(4)]
    for process in several:
        process.start()
    for process in several:
        process.join(60)
    assert [process.exitcode for process in several] == [0] * 4
    assert progress.record_of(work).exercises["91.mean"].attempts == 100
    assert {path.name for path in work.iterdir()} == {progress.MARKER, progress.FILE, "91_trial"}
