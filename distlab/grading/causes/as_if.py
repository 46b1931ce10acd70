"""Find what wrong results are right for: the reference with a different argument or a different reduction.

The reference is called with the drawn arguments of all calls and one thing changed. Where its results are those of the
answer, in every call and on every rank, the change is what is wrong with the answer. Nothing is guessed: an answer that
agrees with no change gets no words from here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from distlab.grading.causes.changes import Change, changed, changes_of, reductions
from distlab.grading.causes.mend import mend_of
from distlab.grading.causes.search import Agreed, Drawn, agreed, explained, is_evidence, next_size, results_of
from distlab.grading.variation.draw import Vary
from distlab.grading.variation.near import near, outcome

BUDGET_S = 2.0  # of a rank's processor time, for all changes of one answer: a busy machine changes no verdict
LIMIT_S = 4.0  # of a batch: a changed argument may make the reference's ranks wait for each other


def cause_of(fn: Callable[..., Any], drawn: Drawn) -> str:
    """Return in words what the results of all drawn calls are right for, or where the answer's own text is wrong.

    "" where no change of the reference has these results, and no change of the answer makes them right.
    """
    return _as_if(drawn) or mend_of(fn, drawn)


def _as_if(drawn: Drawn) -> str:
    """Return in words what the results of all drawn calls are right for, or "" where no change explains them."""
    if not _is_of_one_kind(drawn.got, drawn.wanted):
        return ""
    written = _written(drawn.wanted)
    other = changes_of(drawn.exercise, drawn.reference, drawn.seed, len(drawn.got))
    changes = (change for change in other if change.how != "tensor" or change.what not in written)
    return _of_another_rank(drawn) or _of_a_change(drawn, changes)


def _is_of_one_kind(got: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> bool:
    """Whether each result is a tensor, a number, a list or a dict where the right one is."""
    kinds = (Tensor, bool, int | float, list | tuple, dict, str)
    return all(
        isinstance(outcome(mine), kind) == isinstance(outcome(right), kind)
        for one, other in zip(got, wanted, strict=True)
        for mine, right in zip(one["calls"], other["calls"], strict=True)
        for kind in kinds
    )


def _written(wanted: Sequence[dict[str, Any]]) -> set[str]:
    """Return the names of arguments that the reference writes to: another tensor in their place says nothing."""
    from distlab.grading.diagnosis.values import compare

    calls = [call for run in wanted for call in run["calls"]]
    pairs = [(name, old, dict(call["after"]).get(name)) for call in calls for name, old in call["before"]]
    return {name.partition(".")[0].partition("[")[0] for name, old, new in pairs if compare(new, old) is not None}


def _of_another_rank(drawn: Drawn) -> str:
    """Say so where each rank returns, in every call, what another rank should return."""
    got, wanted, n, scale = drawn.got, drawn.wanted, len(drawn.got), drawn.vary.scale
    turns = [(f"rank {other}", [other] * n) for other in range(n)]
    turns += [(f"rank r {sign} 1", [(rank + step) % n for rank in range(n)]) for sign, step in (("+", 1), ("-", -1))]
    for whose, others in turns if n > 1 else ():
        pairs = [
            (mine, theirs, right)
            for rank, other in enumerate(others)
            for mine, theirs, right in zip(
                results_of(got, rank), results_of(wanted, other), results_of(wanted, rank), strict=True
            )
        ]
        wrong = [mine for mine, _, right in pairs if not near(mine, right, scale)]
        if is_evidence(wrong) and all(near(mine, theirs, scale) for mine, theirs, _ in pairs):
            return f"every rank r returns what {whose} should return, in all {len(pairs) // n} drawn calls."
    return ""


def _of_a_change(drawn: Drawn, changes: Iterator[Change]) -> str:
    """Say so where the reference with one change has the answer's results, or one part of them."""
    from distlab.comm import RankError

    got, wanted, ranks, vary = drawn.got, drawn.wanted, drawn.ranks, drawn.vary
    results = [(results_of(got, rank), results_of(wanted, rank)) for rank in range(len(got))]
    answers = [mine for mine, _ in results]
    spent_s, size, limit_s = 0.0, 1, ranks.timeout_s
    perhaps: list[str] = []  # where few results are wrong, one change of all must explain them
    is_in_place = all(call["result"] is None for run in wanted for call in run["calls"])
    ranks.timeout_s = min(limit_s, LIMIT_S)
    try:
        while spent_s < BUDGET_S and (batch := list(islice(changes, size))):
            found, took_s = zip(*ranks.run(_tried, drawn.reference, vary, drawn.seed, batch, answers), strict=True)
            spent_s += took_s[0]
            for index, change in enumerate(batch):
                part, is_sure = explained([of_rank[index] for of_rank in found], results, vary.scale)
                if part is not None:
                    whole = "what it leaves in its arguments" if is_in_place else "what it returns"
                    whose = f"the result{part}" if part else whole
                    text = f"in all {len(results[0][0])} drawn calls {whose} is what is right {change.words}"
                    if change.how == "does":
                        text = f"{change.words}: so it is in all {len(results[0][0])} drawn calls"
                    text += "." * (not text.endswith("?"))
                    if is_sure or perhaps:  # two that only may be it: nothing is known, however many a batch has
                        return text if is_sure else ""
                    perhaps.append(text)
            size = next_size(size, took_s[0])
    except (RankError, RuntimeError, OSError):
        return ""
    finally:
        ranks.timeout_s = limit_s
    return perhaps[0] if perhaps and spent_s < BUDGET_S else ""


def _tried(
    reference: Callable[..., Any], vary: Vary, seed: int, changes: Sequence[Change], given: Sequence[Sequence[Any]]
) -> tuple[list[Agreed], float]:
    """On a rank, make all calls of the reference with each change."""

    @contextlib.contextmanager
    def made(number: int) -> Iterator[Callable[..., Any]]:
        with reductions(changes[number]) as count:
            yield changed(reference, changes[number], count)

    return agreed(made, len(changes), vary, seed, reference, given)
