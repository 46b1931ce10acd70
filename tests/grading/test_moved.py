"""Lists whose items changed places, or of which one is missing or too many."""

from __future__ import annotations

from operator import eq
from typing import Any

import pytest

from distlab.grading.diagnosis.moved import items_moved
from distlab.grading.diagnosis.values import compare

WANT = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("got", "says"),
    [
        ("edcba", "it is reversed"),
        ("eabcd", "it is rolled by 1"),
        ("bcdea", "it is rolled by -1"),
        ("abce", "; item 3 is missing"),
        ("bcde", "; item 0 is missing"),
        ("abcdee", "; item 5 is too many"),
        ("axbcde", "; item 1 is too many"),
        ("abcde", ""),
        ("badce", ""),
        ("abc", ""),
        ("axcde", ""),
    ],
)
def test_what_became_of_the_items(got: str, says: str) -> None:
    assert items_moved(list(got), WANT, eq) == says


@pytest.mark.parametrize(("got", "code"), [([2, 1], "order"), ([1], "returned"), ([1, 3], "values")])
def test_a_comparison_says_it(got: Any, code: str) -> None:
    fault = compare(got, [1, 2], "it")
    assert fault is not None
    assert fault.code == code
    assert compare([[1, 2], [3]], [[1, 2], [3]]) is None
