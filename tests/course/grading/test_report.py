"""A report says its verdict in words, never by colour alone, and shows the reference only to those who have passed."""

import json
from dataclasses import replace

import pytest
import torch.distributed as dist

from distlab.course.grading import check, load_lesson, reference_of
from distlab.course.grading.check import examine
from distlab.course.grading.progress import MARKER, OUTSIDE, Entry, record_of

SECRET = "total / dist.get_world_size()"  # stands in the reference


def mine(tensor):
    copy = tensor.clone()
    dist.all_reduce(copy)
    return copy.div_(dist.get_world_size())  # <b>mine</b>


def wrong(tensor):
    copy = tensor.clone()
    dist.all_reduce(copy)
    return copy


@pytest.fixture(scope="module")
def passed(lesson):
    return examine(lesson.exercise("91.mean"), mine, worlds=(1, 2))


@pytest.fixture(scope="module")
def failed(lesson):
    return examine(lesson.exercise("91.mean"), wrong, worlds=(2,))


@pytest.fixture
def shown(monkeypatch):
    """What a notebook has displayed."""
    bundles = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: bundles.append(data))
    monkeypatch.setattr("IPython.get_ipython", object)
    return bundles


def test_right_answer(passed, shown):
    assert tuple(str(passed).splitlines()) == (
        "Correct. 91.mean: the mean of all ranks' tensors. Right on 1, 2 ranks.",
        "  sent 800 bytes a rank (a ring needs 800 bytes)",
    )
    assert passed.function is mine
    passed.show()
    passed.show()  # the cell both checks and ends with the report
    (bundle,) = shown
    assert bundle["text/plain"] == str(passed)
    for text in ("<strong>Correct.</strong>", 'aria-live="polite"', SECRET, "&lt;b&gt;mine&lt;/b&gt;"):
        assert text in bundle["text/html"]
    assert "<b>mine</b>" not in bundle["text/html"]


def test_wrong_answer_never_shows_the_reference(failed, shown):
    what = "it is the sum over ranks, not the mean: divide by world_size (2)"
    assert str(failed) == f"Wrong: rank 0's result is 2x too large: {what}"
    assert failed.function is failed.reference
    failed.show()
    assert "<strong>Wrong:</strong>" in shown[0]["text/html"]
    assert SECRET not in shown[0]["text/html"]
    assert SECRET not in json.dumps(failed.as_dict())


def test_messages_are_escaped(failed, shown):
    replace(failed, message="<script>alert(1)</script>\n<i>two</i>", _shown=[]).show()
    assert "<script>" not in shown[0]["text/html"]
    assert "<i>" not in shown[0]["text/html"]


def test_not_attempted(lesson, shown):
    def stub(tensor): ...

    report = examine(lesson.exercise("91.mean"), stub)
    assert str(report).startswith("Not yet attempted. 91.mean is yours to write")
    report.show()
    assert "<strong>Not yet attempted.</strong> 91.mean is yours" in shown[0]["text/html"]
    assert SECRET not in shown[0]["text/html"]


def test_as_data(passed, failed, capsys):
    data = json.loads(json.dumps(passed.as_dict()))
    assert (data["schema"], data["exercise"], data["verdict"]) == (1, "91.mean", "passed")
    assert (data["fault"], data["worlds"]) == (None, [1, 2])
    assert data["budget"] == ["sent 800 bytes a rank (a ring needs 800 bytes)"]
    assert set(data["versions"]) == {"distlab", "python", "torch"}
    assert data["seconds"] > 0
    data = failed.as_dict()
    assert (data["verdict"], data["fault"], data["worlds"]) == ("wrong", "sum not mean", [])
    passed.show()  # outside a notebook
    assert capsys.readouterr().out == ""


@pytest.fixture
def below(tmp_path, lesson, monkeypatch):
    """The working directory: a folder below that of the lessons."""
    folder = tmp_path / "work" / "91_trial"
    folder.mkdir(parents=True)
    (tmp_path / "lessons").symlink_to(lesson.folder.parent)
    monkeypatch.chdir(folder)
    return folder


def test_check_finds_the_lesson_from_a_folder_below(below):
    report = check("91.mean", mine, worlds=(1,))
    assert report.passed
    assert report.progress == OUTSIDE
    with pytest.raises(ValueError, match="lesson 91 has no exercise '91.nothing'; it has 91.mean, 91.double, 91"):
        check("91.nothing", mine)


def test_a_check_repeated_on_the_reference_it_gave_is_no_right_answer(below):
    (below / MARKER).touch()
    failed = check("91.mean", wrong, worlds=(2,))
    assert failed.verdict == "wrong"
    again = check("91.mean", failed.function, worlds=(2,))  # the cell `mean = check("91.mean", mean).function`, twice
    assert again.verdict == "not attempted"
    assert "Run the cell with your function first" in again.message
    assert again.function is failed.function
    assert record_of().exercises["91.mean"] == Entry(attempts=1, failed=1)
    assert check("91.mean", mine, worlds=(1,)).passed


def test_lessons_are_found_by_number_folder_and_exercise(lesson):
    folder = lesson.folder.parent
    for name in ("91", 91, "91_trial", "91.mean"):
        assert load_lesson(name, folder).title == "Trial"
    with pytest.raises(ValueError, match="there is no lesson 17; lessons are 91"):
        load_lesson(17, folder)
    for name in ("", "mean", "-3", "100"):
        with pytest.raises(ValueError, match="names no lesson"):
            load_lesson(name, folder)


def test_a_changed_lesson_is_loaded_anew(tmp_path, lesson):
    folder = tmp_path / "lessons" / "92_other"
    folder.mkdir(parents=True)
    for name in ("solutions", "exercises"):
        (folder / f"{name}.py").write_text((lesson.folder / f"{name}.py").read_text().replace("91", "92"))
    assert load_lesson(92, folder.parent).title == "Trial"
    exercises = folder / "exercises.py"
    exercises.write_text(exercises.read_text().replace('TITLE = "Trial"', 'TITLE = "A second one"'))
    assert load_lesson(92, folder.parent).title == "A second one"
    exercises.write_text("TITLE = 'Half'\n")
    with pytest.raises(ValueError, match="must define TITLE, MINUTES, NEEDS, AIMS and EXERCISES"):
        load_lesson(92, folder.parent)


def test_reference_that_leads_nowhere(lesson):
    exercise = replace(lesson.exercise("91.mean"), source="solutions:nothing")
    with pytest.raises(ValueError, match="'solutions:nothing' leads to no function"):
        reference_of(exercise)
    assert reference_of(replace(exercise, source="distlab.collectives:ring_all_reduce")).__name__ == "ring_all_reduce"
