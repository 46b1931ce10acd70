"""Say how a norm over ranks came about: which of its terms is left out, counted for each rank, or not summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    extremes = {
        min(squares): ", the smallest of the ranks' (as MIN takes)",
        max(squares): ", the largest (as MAX takes)",
    }
    sums = "a sum over ranks is asked, the default of dist.all_reduce"
    ranks = [
        (squares[rank], f"has of `{name}` this rank's parts alone: all_reduce their sum of squares"),
        *((one, f"has of `{name}` rank {r}'s alone{extremes.get(one, '')}: {sums}") for r, one in enumerate(squares)),
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


def explain_norms(norms: Sequence[float], terms: Sequence[Sequence[Term]]) -> str:
    """Return in words which terms make these very norms, one wrong before two; "" where none do.

    Each rank's norm must come about alike: on one rank alone, a value may be that of several mistakes.

    Args:
        norms: those that are not right, of one rank each.
        terms: of the right norm, as these ranks have them; alike in order.
    """
    for number in (1, 2):
        for places in combinations(range(len(terms[0])), number):
            for chosen in product(*(range(len(terms[0][place].wrong)) for place in places)):
                wrong = dict(zip(places, chosen, strict=True))
                if all(close(norm, _made(own, wrong)) for norm, own in zip(norms, terms, strict=True)):
                    return ", and ".join(terms[0][place].wrong[index][1] for place, index in wrong.items())
    added = {_added(norm, own) for norm, own in zip(norms, terms, strict=True)}
    return added.pop() if len(added) == 1 else ""


def _made(terms: Sequence[Term], wrong: Mapping[int, int]) -> float:
    """Return the norm that terms make, some of them by a mistake."""
    squares = (term.wrong[wrong[at]][0] if at in wrong else term.square for at, term in enumerate(terms))
    return float(sum(squares) ** 0.5)


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
