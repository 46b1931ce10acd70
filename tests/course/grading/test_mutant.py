"""Mutants written as edits of a reference: what is replaced, where it must stand, and what a mistake is told."""

import linecache
import traceback
from dataclasses import replace

import pytest

from distlab.course.grading import Mutant, load_lesson, reference_of
from distlab.course.grading.lesson import mutant_named
from distlab.course.grading.mutant import build, wrong_text

SUM = Mutant("a sum", "sum not mean", "too large", 3, 9)


def double_all(values: list[int], *, times: int = 2) -> list[int]:
    """Return every value times two: the docstring holds `times` too, and no edit sees it."""
    doubled = []
    for value in values:
        if value:
            doubled.append(times * value)

    return doubled


def made(mutant):
    return build(mutant, "91.double", double_all).fn


def test_an_edit_makes_a_function_of_its_own():
    wrong = made(SUM.edit("times * value", "value"))
    assert (wrong([1, 2]), double_all([1, 2])) == ([1, 2], [2, 4])
    assert (wrong.__name__, SUM.source) == ("double_all", "bug museum 9")
    assert SUM.edits == (), "edit returns a new mutant"


def test_several_edits_and_lines_keep_the_indentation():
    mutant = SUM.edit(
        "if value:\n    doubled.append(times * value)", "doubled.append(value)\ndoubled.append(times)"
    ).edit("return doubled", "return doubled[1:]")
    assert made(mutant)([5, 0]) == [2, 0, 2]
    dedented = SUM.edit(
        """
        if value:
            doubled.append(times * value)

        """,
        """
        if value > 1:
            doubled.append(value)
        """,
    )
    assert made(dedented)([1, 5]) == [5]
    assert "docstring" not in wrong_text(dedented, double_all)


def test_left_out_a_new_body_and_lines_before():
    assert made(SUM.edit("if value:", "if True:").without("times * "))([0, 3]) == [0, 3]
    other = SUM.setup("from math import prod").body("""
        if not values:
            return []
        return [prod(values)]
    """)
    assert (made(other)([2, 3]), made(SUM.edit("doubled", "found", times=3))([4])) == ([6], [8])


def test_an_edit_must_fit_once_and_give_python():
    for old, got in (("tripled", 0), ("value", 5), ("if value:\n        doubled", 0)):
        with pytest.raises(ValueError, match=rf"'a sum' of 91.double: .* 1 time\(s\) in the reference, got {got}"):
            made(SUM.edit(old, "x"))
    with pytest.raises(ValueError, match="mutant 'a sum' of 91.double is not Python"):
        made(SUM.edit("if value:", "if value"))


def test_a_traceback_shows_the_wrong_line():
    wrong = made(SUM.edit("times * value", "times * value / 0"))
    with pytest.raises(ZeroDivisionError) as caught:
        wrong([1])
    text = "".join(traceback.format_exception(caught.value))
    assert 'File "91.double, a sum"' in text
    assert "doubled.append(times * value / 0)" in text
    linecache.checkcache()
    assert linecache.getline("91.double, a sum", 1).startswith("def double_all")


def test_a_lesson_builds_its_mutants_and_the_one_to_repair(lesson):
    exercise = lesson.exercise("91.mean")
    mutant = lesson.mutants[0]
    assert (mutant.exercise, mutant.name) == ("91.mean", "sum")
    assert mutant.fn is not reference_of(exercise)
    assert mutant.fn.__code__.co_filename == "91.mean, sum"
    with pytest.raises(ValueError, match="91.mean has no mutant 'mean'; it has 'sum'"):
        mutant_named(exercise, "mean")
    exercise = replace(lesson.exercise("91.mean"), mutants=(SUM.without("nothing"),))
    with pytest.raises(ValueError, match="mutant 'a sum' of 91.mean"):
        _ = replace(lesson, exercises=(exercise,)).mutants
    assert load_lesson("91", lesson.folder.parent).mutants
