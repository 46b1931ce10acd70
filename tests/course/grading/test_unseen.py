"""A result that nothing sent can have brought about is told; so are the reference and the library's own work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from distlab import collectives
from distlab.course.grading import load_lesson, reference_of
from distlab.course.grading.check import examine

FLAT = load_lesson("03.flat").exercise("03.flat")
reference = reference_of(FLAT)


def test_the_reference_is_not_an_answer() -> None:
    report = examine(FLAT, lambda module: reference(module), worlds=(1,))
    assert (report.verdict, report.fault) == ("wrong", "reference"), str(report)
    assert "write the function yourself" in report.message


def by_name(tensor, group=None):
    return through(tensor, group)


through = collectives.ring_all_gather


@pytest.mark.parametrize("fn", [by_name, through, partial(through)])
def test_the_librarys_own_function_is_not_an_answer(fn: Callable[..., object]) -> None:
    report = examine(load_lesson("02.ring_all_gather").exercise("02.ring_all_gather"), fn, worlds=(1,))
    assert (report.verdict, report.fault) == ("wrong", "library"), str(report)
    assert "it calls distlab.collectives.ring.ring_all_gather of the library" in report.message
