"""Say how a norm over ranks came about: which of its terms is left out, counted for each rank, or not summed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import NamedTuple

from distlab.grading.diagnosis.values import close


class Term(NamedTuple):
    """A part of the sum of squares.

    Attributes:
        name: what it is called in the exercise.
        square: its sum of squares, each element counted once.
        wrong: what a mistake makes of it, each with words that follow "the norm ".
    """

    name: str
    square: float
    wrong: Sequence[tuple[float, str]]


def of_parts(name: str, squares: Sequence[float], rank: int) -> Term:
    """Return the term of gradients whose parts lie on the ranks.

    Args:
        name: what they are called.
        squares: the sum of squares of each rank's parts.
        rank: whose norm it is.
    """
    n, total = len(squares), sum(squares)
    sums = "a sum over ranks is asked, the default of dist.all_reduce"
    ranks = [
        (squares[rank], f"has of `{name}` this rank's parts alone: all_reduce their sum of squares"),
        (max(squares), f"has of `{name}` the parts of the rank with the largest sum of squares alone (MAX): {sums}"),
        (min(squares), f"has of `{name}` the parts of the rank with the smallest sum of squares alone (MIN): {sums}"),
        (squares[0], f"has of `{name}` rank 0's parts alone: {sums}"),
        (total / n, f"has the mean over ranks of the squares of `{name}`: each rank holds other parts, add them up"),
        (n * total, f"counts `{name}` {n} times"),
    ]
    return Term(name, total, [(0.0, f"leaves out `{name}`"), *(ranks if n > 1 else ())])


def of_copies(name: str, square: float, n: int) -> Term:
    """Return the term of gradients that each of n ranks holds whole."""
    behind = "every rank has them, so add their squares behind the all-reduce, once"
    ranks = [
        (n * square, f"counts `{name}` {n} times, once for each rank that holds them: {behind}"),
        (n * n * square, f"has {n} times the gradients `{name}`, summed over ranks: {behind}"),
        (square / n, f"has a part of the squares of `{name}` alone, 1/{n}: {behind}"),
    ]
    return Term(name, square, [(0.0, f"leaves out `{name}`"), *(ranks if n > 1 else ())])


def explain_norm(norm: float, terms: Sequence[Term]) -> str:
    """Return in words which terms make this very norm, one wrong before two; "" where none do.

    Args:
        norm: what was found; it is not the right one.
        terms: of the right one.
    """
    for number in (1, 2):
        for chosen in combinations(terms, number):
            others = sum(term.square for term in terms if term not in chosen)
            for wrong in product(*(term.wrong for term in chosen)):
                if close(norm, (others + sum(square for square, _ in wrong)) ** 0.5):
                    return ", and ".join(words for _, words in wrong)
    return _added(norm, terms)


def _added(norm: float, terms: Sequence[Term]) -> str:
    """Return words for a norm that is a sum of norms: each term's, or one term's and that of the others together."""
    total = sum(term.square for term in terms)
    apart = [(term.square**0.5 + (total - term.square) ** 0.5, [f"`{term.name}`", "the rest"]) for term in terms]
    apart.append((sum(term.square**0.5 for term in terms), [f"`{term.name}`" for term in terms]))
    for added, names in apart[::-1] if len(terms) > 1 else ():
        if close(norm, added):
            listed = f"{', '.join(names[:-1])} and {names[-1]}"
            return f"adds the norms of {listed}: lengths do not add, their squares do; take the root at the end"
    return ""
