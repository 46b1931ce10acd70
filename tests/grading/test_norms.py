"""A wrong norm is told by the terms that make it, and by nothing where none does."""

from __future__ import annotations

import math

import pytest

from distlab.grading.diagnosis.norms import Term, explain_norms, of_copies, of_parts

SQUARES = (5.0, 11.0, 23.0)
TERMS = (of_parts("split", SQUARES, 1), of_copies("whole", 7.0, 3), of_copies("partial", 2.5, 3))


@pytest.mark.parametrize(
    ("square", "says"),
    [
        (39 + 7.0, "leaves out `partial`"),
        (39 + 2.5, "leaves out `whole`"),
        (7 + 2.5, "leaves out `split`"),
        (23 + 7 + 2.5, "has of `split` rank 2's alone, the largest (as MAX takes)"),
        (5 + 7 + 2.5, "has of `split` rank 0's alone, the smallest of the ranks' (as MIN takes)"),
        (11 + 7 + 2.5, "has of `split` this rank's parts alone"),
        (13 + 7 + 2.5, "has the mean over ranks of the squares of `split`"),
        (39 + 21 + 2.5, "counts `whole` 3 times"),
        (39 + 63 + 2.5, "has 3 times the gradients `whole`"),
        (39 + 21 + 7.5, "counts `whole` 3 times, once for each rank that holds them"),
        (
            23 + 7 + 7.5,
            "(as MAX takes): a sum over ranks is asked, the default of dist.all_reduce, and counts `partial` 3 times",
        ),
    ],
)
def test_terms_are_found(square: float, says: str) -> None:
    assert says in explain_norms([math.sqrt(square)], [TERMS])


def test_a_value_of_several_mistakes_is_told_by_the_other_ranks() -> None:
    terms = [(of_parts("split", SQUARES, rank), *TERMS[1:]) for rank in range(3)]
    smallest = [math.sqrt(5 + 9.5)] * 3  # on rank 0 alone these are its own parts
    assert explain_norms(smallest, terms).startswith("has of `split` rank 0's alone, the smallest")
    own = [math.sqrt(square + 9.5) for square in SQUARES]
    assert explain_norms(own, terms).startswith("has of `split` this rank's parts alone")
    assert explain_norms([own[0], own[0], own[2]], terms) == ""


def test_norms_that_were_added_are_told() -> None:
    norm = math.sqrt(7 + 2.5) + math.sqrt(39)
    assert "adds the norms of `split` and the rest" in explain_norms([norm], [TERMS])
    norm = math.sqrt(7) + math.sqrt(2.5) + math.sqrt(39)
    assert "adds the norms of `split`, `whole` and `partial`" in explain_norms([norm], [TERMS])
    assert "adds the norms of `split` and `whole`" in explain_norms([math.sqrt(39) + math.sqrt(7)], [TERMS[:2]])


def test_nothing_is_guessed() -> None:
    assert explain_norms([1.2345], [TERMS]) == ""
    assert of_parts("split", (5.0,), 0).wrong == [(0.0, "leaves out `split`")]
    assert explain_norms([3.0], [[Term("a", 4.0, [])]]) == ""
