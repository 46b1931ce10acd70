"""A learner who is stuck sees the hints one by one, and the solution after trying; the progress says so."""

from dataclasses import replace
from pathlib import Path

import pytest

from distlab.grading import Lesson, Report, load_lesson, progress, reference_of
from distlab.grading.progress import FILE, MARKER, OUTSIDE, Record, keep, load_progress
from distlab.notebook import hint, solution

NAME = "03.flat"
SECRET = "torch.cat("  # stands in the reference, and not in a hint


@pytest.fixture(scope="module")
def lesson() -> Lesson:
    return load_lesson("03", Path(__file__).resolve().parents[2] / "lessons")


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
    assert load_progress()[NAME].hints == 3
    assert load_progress()[NAME].attempts == 0


def test_the_solution_says_in_one_line_what_is_missing(work, lesson):
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
    hint(NAME)
    hint(NAME)
    some = f"solution: 1 of 3 failed checks, 2 of 3 hints seen so far; {check_it} and {next_hint}"
    assert repr(solution(NAME)) == some
    hint(NAME)
    assert repr(solution(NAME)) == f"solution: 1 of 3 failed checks, 3 of 3 hints seen so far; {check_it}"
    checked(lesson, "wrong")
    checked(lesson, "wrong")
    assert load_progress()[NAME].solution_seen == ""
    assert repr(solution(NAME)).startswith(f"The solution of {NAME}:")


def test_hints_alone_may_be_missing(work, lesson):
    for _ in range(4):
        checked(lesson, "wrong")
    words = "solution: 3 of 3 failed checks, 0 of 3 hints seen so far; "
    assert repr(solution(NAME)) == f'{words}hint("{NAME}") shows and counts the next hint'


def stuck(lesson: Lesson) -> None:
    for _ in range(3):
        checked(lesson, "wrong")
        hint(NAME)


def test_the_solution_is_shown_and_noted(work, lesson):
    stuck(lesson)
    shown = solution(NAME)
    assert "white-space:pre;overflow-x:auto" in shown._repr_html_(), "a long line scrolls, no word is broken"
    assert hint(NAME)._repr_html_() is None
    exercise = lesson.exercise(NAME)
    for text in (repr(shown), shown._repr_markdown_()):
        assert f"def {exercise.function}(" in text
        assert SECRET in text
        assert all(line in text for line in exercise.imports)
    assert "```python\n" in shown._repr_markdown_()
    first = load_progress()[NAME]
    assert first.solution_seen
    assert not first.passed
    solution(NAME)
    assert load_progress()[NAME] == first
    checked(lesson, "passed")
    entry = load_progress()[NAME]
    assert entry.passed
    assert entry.solution_seen == first.solution_seen


def test_after_a_right_answer_it_is_shown_and_not_noted(work, lesson):
    checked(lesson, "passed")
    assert SECRET in repr(solution(NAME))
    assert load_progress()[NAME].solution_seen == ""


def test_outside_a_work_folder_this_kernel_counts(outside, lesson):
    stuck(lesson)
    assert SECRET in repr(solution(NAME))
    assert list(outside.iterdir()) == []


def test_a_damaged_file_is_told(work):
    (work / FILE).write_text("{")
    assert "progress.json could not be read" in repr(hint(NAME))


def test_an_exercise_without_hints(work, lesson, monkeypatch):
    bare = replace(lesson, exercises=tuple(replace(exercise, hints=()) for exercise in lesson.exercises))
    monkeypatch.setattr("distlab.notebook.learner.stuck.load_lesson", lambda name: bare)
    assert repr(hint(NAME)) == f"hint: {NAME} has no hints"
    for _ in range(3):
        checked(lesson, "wrong")
    assert SECRET in repr(solution(NAME))


@pytest.mark.parametrize("show", [hint, solution])
@pytest.mark.parametrize("name", ["03.nothing", "99.flat", "flat"])
def test_a_name_that_is_no_exercise(work, show, name):
    with pytest.raises(ValueError, match="no exercise|no lesson"):
        show(name)


def test_the_third_wrong_answer_names_hints_and_solution_once(work, lesson):
    exercise = lesson.exercise(NAME)
    wrong = Report(exercise, "wrong", "x", "", (), (1,), 0.1, None, reference_of(exercise))
    told = [keep(wrong) for _ in range(5)]
    sentence = f'Stuck? In the notebook, hint("{NAME}") shows a hint, and after all hints solution("{NAME}")'
    assert told == ["", "", f"{sentence} shows the solution.", "", ""]


def test_outside_a_work_folder_too_but_not_once_it_passed(outside, lesson):
    exercise = lesson.exercise(NAME)
    wrong = Report(exercise, "wrong", "x", "", (), (1,), 0.1, None, reference_of(exercise))
    told = [keep(wrong) for _ in range(3)]
    assert [words.startswith("Stuck? ") for words in told] == [False, False, True]
    assert told[2].endswith(OUTSIDE)
    checked(lesson, "passed")
    assert keep(wrong) == OUTSIDE
