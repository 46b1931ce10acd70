"""Find what wrong results are right for: the reference with another argument, or with another reduction.

The reference is called with the drawn arguments of all calls and one thing changed. Where its results are those of the
answer, in every call and on every rank, the change is what is wrong with the answer. Nothing is guessed: an answer that
agrees with no change gets no words from here.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distlab.grading.exercise import Exercise
from distlab.grading.variation.calls import call_varied
from distlab.grading.variation.changes import Change, changed, changes_of, reductions
from distlab.grading.variation.draw import Vary
from distlab.grading.variation.near import is_telling, near

if TYPE_CHECKING:
    from distlab.comm import Ranks

BUDGET_S = 1.0  # of a rank's processor time, for all changes of one answer: a busy machine changes no verdict
BATCH_S = 0.2  # of that, for changes that are tried one after another
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
    written = _written(wanted)
    changes = [
        change
        for change in changes_of(exercise, reference, seed, len(got))
        if change.how != "tensor" or change.what not in written
    ]
    other_rank = _of_another_rank(exercise, got, wanted)
    return other_rank or _of_a_change(exercise, reference, ranks, seed, got, wanted, changes)


def _written(wanted: Sequence[dict[str, Any]]) -> set[str]:
    """Return the names of arguments that the reference writes to: another tensor in their place says nothing."""
    from distlab.grading.diagnosis.values import compare

    calls = [call for run in wanted for call in run["calls"]]
    pairs = [(name, old, dict(call["after"]).get(name)) for call in calls for name, old in call["before"]]
    return {name.partition(".")[0].partition("[")[0] for name, old, new in pairs if compare(new, old) is not None}


def _results(run: Sequence[dict[str, Any]], rank: int) -> list[Any]:
    return [_outcome(call) for call in run[rank]["calls"]]


def _outcome(call: dict[str, Any]) -> Any:
    """Return a call's result, or what it left in its arguments where it returns nothing."""
    return dict(call["after"]) if call["result"] is None else call["result"]


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
    changes: list[Change],
) -> str:
    from distlab.comm import RankError

    results = [(_results(got, rank), _results(wanted, rank)) for rank in range(len(got))]
    assert exercise.vary is not None
    spent_s, size, limit_s = 0.0, 1, ranks.timeout_s
    is_in_place = all(call["result"] is None for run in wanted for call in run["calls"])
    ranks.timeout_s = min(limit_s, LIMIT_S)
    try:
        while changes and spent_s < BUDGET_S:
            batch, changes = changes[:size], changes[size:]
            found, took_s = zip(*ranks.run(_tried, reference, exercise.vary, seed, batch, results), strict=True)
            spent_s += took_s[0]
            for index, change in enumerate(batch):
                part = _explained([of_rank[index] for of_rank in found], results, exercise.vary.scale)
                if part is not None:
                    whole = "what it leaves in its arguments" if is_in_place else "what it returns"
                    whose = f"the result{part}" if part else whole
                    of = "that of an answer that" if change.how == "does" else "what is right"
                    text = f"in all {len(results[0][0])} drawn calls {whose} is {of} {change.words}"
                    return text + "." * (not text.endswith("?"))
            size = max(1, min(16, int(BATCH_S * size / max(took_s[0], 1e-3))))
    except (RankError, RuntimeError, OSError):
        return ""
    finally:
        ranks.timeout_s = limit_s
    return ""


def _explained(
    found: Sequence[dict[str, list[bool]]], results: Sequence[tuple[list[Any], list[Any]]], scale: float
) -> str | None:
    """Return the part of the results that a change explains on all ranks: "" for the whole; None for no part.

    Of the parts only the first that is wrong counts: others may follow from it.
    """
    for part in dict.fromkeys(name for got, _ in results for result in got for name, _ in _parts(result)):
        pairs = [pair for got, want in results for pair in zip(_part(got, part), _part(want, part), strict=True)]
        wrong = [mine for mine, right in pairs if not near(mine, right, scale)]
        if wrong and all(part in of_rank and all(of_rank[part]) for of_rank in found):
            odd = [one for pair in pairs for one in _odd(*pair, scale)]
            return part if _is_evidence(odd) else None
        if wrong and part:
            return None
    return None


def _odd(mine: Any, right: Any, scale: float) -> list[Any]:
    """Return what of a wrong result is wrong: some of its parts, or the whole."""
    theirs = dict(_parts(right))
    parts = [value for name, value in _parts(mine) if name and not near(value, theirs.get(name), scale)]
    return parts or ([] if near(mine, right, scale) else [mine])


def _part(results: Sequence[Any], part: str) -> list[Any]:
    return [dict(_parts(result)).get(part) for result in results]


def _parts(result: Any) -> Iterator[tuple[str, Any]]:
    """Yield a result, and what is in it by place, if it is a dict or a list of a few parts."""
    yield "", result
    if isinstance(result, dict):
        yield from ((f"[{key!r}]", value) for key, value in result.items())
    elif isinstance(result, list | tuple) and 1 < len(result) <= 4:
        yield from ((f"[{index}]", value) for index, value in enumerate(result))


def _tried(
    reference: Callable[..., Any],
    vary: Vary,
    seed: int,
    changes: Sequence[Change],
    results: Sequence[tuple[list[Any], list[Any]]],
) -> tuple[list[dict[str, list[bool]]], float]:
    """On a rank, make all calls with each change; return where parts of results are the answer's, and the seconds."""
    import torch.distributed as dist

    got, begun = results[dist.get_rank()][0], time.thread_time()
    found: list[dict[str, list[bool]]] = []
    for change in changes:
        alike: dict[str, list[bool]] = {}
        with reductions(change) as made, contextlib.suppress(Exception):  # the reference may take no such argument
            other = changed(reference, change, made)
            calls = call_varied(other, vary, seed, reference, results_only=True)["calls"]
            for mine, call in zip(got, calls, strict=True):
                theirs = dict(_parts(_outcome(call)))
                for part, value in _parts(mine):
                    alike.setdefault(part, []).append(part in theirs and near(value, theirs[part], vary.scale))
        found.append({part: each for part, each in alike.items() if len(each) == len(got)})
    return found, time.thread_time() - begun
