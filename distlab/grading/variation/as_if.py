"""Find what wrong results are right for: the reference with another argument, another reduction or another text.

The reference is called with the drawn arguments of all calls and one thing changed. Where its results are those of the
answer, in every call and on every rank, the change is what is wrong with the answer. Nothing is guessed: an answer that
agrees with no change gets no words from here, unless its results follow from the right ones (`relations`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distlab.grading.exercise import Exercise
from distlab.grading.variation.calls import call_varied
from distlab.grading.variation.changes import Change, changed, changes_of, reductions, slips_of
from distlab.grading.variation.draw import Vary
from distlab.grading.variation.near import is_telling, near, outcome, parts
from distlab.grading.variation.relations import relation

if TYPE_CHECKING:
    from distlab.comm import Ranks

BUDGET_S = 2.0  # of a rank's processor time, for all changes of one answer: a busy machine changes no verdict
BATCH_S = 0.2  # of that, for changes that are tried one after another
ONE_S = 0.3  # of that, for one change: another condition may make a loop without end
LIMIT_S = 10.0  # of a batch: a changed argument may make the reference's ranks wait for each other
FEWEST = 3  # wrong results without a drawn number in them that a change must explain


def cause_of(
    exercise: Exercise,
    reference: Callable[..., Any],
    ranks: Ranks,
    seed: int,
    got: Sequence[dict[str, Any]],
    wanted: Sequence[dict[str, Any]],
) -> str:
    """Return in words what the results of all drawn calls are right for, or "" where no change explains them.

    Args:
        exercise: whose calls were drawn.
        reference: the right function.
        ranks: those that made the calls; a change that they do not survive ends the search.
        seed: of the draws.
        got: for each rank what `call_varied` returned for the answer.
        wanted: the same for the reference.
    """
    if not _is_of_one_kind(got, wanted):
        return ""
    written = _written(wanted)
    other = changes_of(exercise, reference, seed, len(got))
    changes = chain(
        (change for change in other if change.how != "tensor" or change.what not in written),
        slips_of(reference, len(got)),
    )
    other_rank = _of_another_rank(exercise, got, wanted)
    found = other_rank or _of_a_change(exercise, reference, ranks, seed, got, wanted, changes)
    return found or relation(got, wanted, exercise.vary.scale if exercise.vary is not None else 1.0)


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


def _results(run: Sequence[dict[str, Any]], rank: int) -> list[Any]:
    return [outcome(call) for call in run[rank]["calls"]]


def _of_another_rank(exercise: Exercise, got: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> str:
    """Say so where each rank returns, in every call, what another rank should return."""
    n, scale = len(got), exercise.vary.scale if exercise.vary is not None else 1.0
    turns = [(f"rank {other}", [other] * n) for other in range(n)]
    turns += [(f"rank r {sign} 1", [(rank + step) % n for rank in range(n)]) for sign, step in (("+", 1), ("-", -1))]
    for whose, others in turns if n > 1 else ():
        pairs = [
            (mine, theirs, right)
            for rank, other in enumerate(others)
            for mine, theirs, right in zip(
                _results(got, rank), _results(wanted, other), _results(wanted, rank), strict=True
            )
        ]
        wrong = [mine for mine, _, right in pairs if not near(mine, right, scale)]
        if _is_evidence(wrong) and all(near(mine, theirs, scale) for mine, theirs, _ in pairs):
            return f"every rank r returns what {whose} should return, in all {len(pairs) // n} drawn calls."
    return ""


def _is_evidence(wrong: Sequence[Any]) -> bool:
    """Whether wrong results tell where they come from: by drawn digits, or whole numbers that are not all alike."""
    if any(isinstance(one, float) and math.isfinite(one) and one != round(one) for one in wrong):
        return True
    if len({str(one) for one in wrong}) < 2:
        return any(isinstance(one, Tensor) and is_telling(one) for one in wrong)
    is_some = any(one is not None and one != 0 for one in wrong if not isinstance(one, Tensor))
    return any(map(is_telling, wrong)) or (len(wrong) >= FEWEST and is_some)


def _of_a_change(
    exercise: Exercise,
    reference: Callable[..., Any],
    ranks: Ranks,
    seed: int,
    got: Sequence[dict[str, Any]],
    wanted: Sequence[dict[str, Any]],
    changes: Iterator[Change],
) -> str:
    from distlab.comm import RankError

    results = [(_results(got, rank), _results(wanted, rank)) for rank in range(len(got))]
    assert exercise.vary is not None
    spent_s, size, limit_s = 0.0, 1, ranks.timeout_s
    perhaps: list[str] = []  # where few results are wrong, one change of all must explain them
    is_in_place = all(call["result"] is None for run in wanted for call in run["calls"])
    ranks.timeout_s = min(limit_s, LIMIT_S)
    try:
        while spent_s < BUDGET_S and (batch := list(islice(changes, size))):
            found, took_s = zip(*ranks.run(_tried, reference, exercise.vary, seed, batch, results), strict=True)
            spent_s += took_s[0]
            for index, change in enumerate(batch):
                part, is_sure = _explained([of_rank[index] for of_rank in found], results, exercise.vary.scale)
                if part is not None:
                    whole = "what it leaves in its arguments" if is_in_place else "what it returns"
                    whose = f"the result{part}" if part else whole
                    of = {"does": "that of an answer that", "text": "that of"}.get(change.how, "what is right")
                    text = f"in all {len(results[0][0])} drawn calls {whose} is {of} {change.words}"
                    text += "." * (not text.endswith("?"))
                    if is_sure or perhaps:  # two that only may be it: nothing is known, however many a batch has
                        return text if is_sure else ""
                    perhaps.append(text)
            size = max(1, min(64, 4 * size, int(BATCH_S * size / max(took_s[0], 1e-3))))
    except (RankError, RuntimeError, OSError):
        return ""
    finally:
        ranks.timeout_s = limit_s
    return perhaps[0] if perhaps and spent_s < BUDGET_S else ""


def _explained(
    found: Sequence[dict[str, list[bool]]], results: Sequence[tuple[list[Any], list[Any]]], scale: float
) -> tuple[str | None, bool]:
    """Return the part of the results that a change explains on all ranks, and whether they tell where they come from.

    "" stands for the whole, None for no part. Of the parts only the first that is wrong counts: others may follow.
    """
    for part in dict.fromkeys(name for got, _ in results for result in got for name, _ in parts(result)):
        pairs = [pair for got, want in results for pair in zip(_part(got, part), _part(want, part), strict=True)]
        wrong = [mine for mine, right in pairs if not near(mine, right, scale)]
        if wrong and all(part in of_rank and all(of_rank[part]) for of_rank in found):
            odd = [one for pair in pairs for one in _odd(*pair, scale)]
            return part, _is_evidence(odd)
        if wrong and part:
            break
    return None, False


def _odd(mine: Any, right: Any, scale: float) -> list[Any]:
    """Return what of a wrong result is wrong: some of its parts, or the whole."""
    theirs = dict(parts(right))
    odd = [value for name, value in parts(mine) if name and not near(value, theirs.get(name), scale)]
    return odd or ([] if near(mine, right, scale) else [mine])


def _part(results: Sequence[Any], part: str) -> list[Any]:
    return [dict(parts(result)).get(part) for result in results]


def _tried(
    reference: Callable[..., Any],
    vary: Vary,
    seed: int,
    changes: Sequence[Change],
    results: Sequence[tuple[list[Any], list[Any]]],
) -> tuple[list[dict[str, list[bool]]], float]:
    """On a rank, make all calls with each change; return where parts of results are the answer's, and the seconds.

    A change's calls end where no rank has a part that is alike in all calls so far.
    """
    import torch
    import torch.distributed as dist

    got, begun, all_reduce = results[dist.get_rank()][0], time.thread_time(), dist.all_reduce
    found: list[dict[str, list[bool]]] = []

    def goes_on(alike: dict[str, list[bool]], number: int, call: dict[str, Any]) -> bool:
        theirs = dict(parts(outcome(call)))
        for part, value in parts(got[number]):
            alike.setdefault(part, []).append(part in theirs and near(value, theirs[part], vary.scale))
        is_alike = torch.tensor(int(any(map(all, alike.values()))))
        if dist.get_world_size() > 1:
            all_reduce(is_alike, dist.ReduceOp.MIN)
        return bool(is_alike)

    for change in changes:
        alike: dict[str, list[bool]] = {}
        with reductions(change) as made, _limited(), contextlib.suppress(Exception):  # it may take no such argument
            fn = changed(reference, change, made)
            call_varied(fn, vary, seed, reference, goes_on=functools.partial(goes_on, alike))
        found.append({part: each for part, each in alike.items() if len(each) == len(got)})
    return found, time.thread_time() - begun


class _TooLong(RuntimeError):
    """A change made a call that does not end."""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise in this process where what follows takes too long, and let nothing warn."""

    def stop(number: int, frame: Any) -> None:
        raise _TooLong

    old = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, ONE_S)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)
