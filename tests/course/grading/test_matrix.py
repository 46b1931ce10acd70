"""The matrix of variation: every exercise varies every axis, or says why it leaves one out."""

import random
from pathlib import Path

import pytest
from varied_axes import AXES, coverage, stale_reasons

from distlab.course.grading import lessons, load_lesson, reference_of
from distlab.course.grading.check import examine

FOLDER = Path(__file__).resolve().parents[3] / "lessons"
LESSONS = [load_lesson(number, FOLDER) for number in lessons(FOLDER)]
EXERCISES = [pytest.param(exercise, id=exercise.name) for lesson in LESSONS for exercise in lesson.exercises]


@pytest.mark.parametrize("exercise", EXERCISES)
def test_every_axis_is_varied_or_left_out_for_a_reason(exercise):
    cells, vary = coverage(exercise, reference_of(exercise)), exercise.vary
    assert list(cells) == list(AXES)
    empty = [axis for axis, cell in cells.items() if not cell]
    assert not empty, f"{exercise.name}: vary {empty}, or give the reason in Vary(left_out=...)"
    assert not stale_reasons(exercise, cells), f"{exercise.name}: these are varied, and said to be left out"
    assert 0 < vary.least_bytes <= 1, f"{exercise.name}: the share of the reference's bytes that any right answer sends"
    has_reason = bool(vary.left_out.get("bytes"))
    assert has_reason == (vary.least_bytes < 1), f"{exercise.name}: say why a right answer may send less"


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("exercise", EXERCISES)
def test_reference_passes_with_any_seed(exercise):
    for _ in range(20):
        report = examine(exercise, reference_of(exercise), seed=(seed := random.randrange(10**6)))
        assert report.passed, f"seed {seed}: {report}"
