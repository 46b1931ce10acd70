"""Try functions on the drawn calls, one after another: which have, in every call and on every rank, given results?"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from distlab.grading.exercise import Exercise, Refused
from distlab.grading.variation.calls import call_varied
from distlab.grading.variation.draw import Vary
from distlab.grading.variation.near import is_telling, near, outcome, parts

if TYPE_CHECKING:
    from distlab.comm import Ranks

BATCH_S = 0.2  # of a rank's processor time, for functions that are tried one after another
ONE_S = 0.3  # of that, for one function: another condition may make a loop without end
MOST = 64  # functions of a batch
FEWEST = 3  # wrong results without a drawn number in them that a change must explain
Agreed = dict[str, list[bool]]  # for each part of the results, call by call, whether it is the given one's


class Drawn(NamedTuple):
    """The drawn calls of an answer and of the reference, and what it takes to make them again.

    Attributes:
        exercise: whose calls were drawn.
        reference: the right function.
        ranks: those that made the calls; a change that they do not survive ends a search.
        seed: of the draws.
        got: for each rank what `call_varied` returned for the answer; empty where it did not come to an end.
        wanted: the same for the reference.
    """

    exercise: Exercise
    reference: Callable[..., Any]
    ranks: Ranks
    seed: int
    got: Sequence[dict[str, Any]]
    wanted: Sequence[dict[str, Any]]

    @property
    def vary(self) -> Vary:
        """How the calls vary."""
        assert self.exercise.vary is not None
        return self.exercise.vary


def results_of(run: Sequence[dict[str, Any]], rank: int) -> list[Any]:
    """Return the results of all calls on a rank."""
    return [outcome(call) for call in run[rank]["calls"]]


def next_size(size: int, took_s: float) -> int:
    """Return how many functions to try next: batches grow fourfold while they are cheap."""
    return max(1, min(MOST, 4 * size, int(BATCH_S * size / max(took_s, 1e-3))))


def agreed(
    made: Callable[[int], contextlib.AbstractContextManager[Callable[..., Any]]],
    count: int,
    vary: Vary,
    seed: int,
    names_of: Callable[..., Any],
    given: Sequence[Sequence[Any]],
    *,
    needed: str | None = None,
) -> tuple[list[Agreed], float]:
    """On a rank, make all calls with each function; return where parts of results are the given ones, and the seconds.

    A function's calls end where a rank has no part that is alike in all calls so far, or not the one that is needed.

    Args:
        made: makes the function of a number; what it changes for a while is put back.
        count: how many there are.
        vary: how the calls vary.
        seed: of the draws.
        names_of: the reference.
        given: for each rank the results to be compared with.
        needed: the part that must be alike; None: any.
    """
    import torch
    import torch.distributed as dist

    mine, begun, all_reduce = given[dist.get_rank()], time.thread_time(), dist.all_reduce
    found: list[Agreed] = []

    def all_agree(is_alike: bool) -> bool:
        vote = torch.tensor(int(is_alike))
        if dist.get_world_size() > 1:
            all_reduce(vote, dist.ReduceOp.MIN)
        return bool(vote)

    def goes_on(alike: Agreed, number: int, call: dict[str, Any]) -> bool:
        theirs = dict(parts(outcome(call)))
        for part, value in parts(mine[number]):
            alike.setdefault(part, []).append(part in theirs and near(theirs[part], value, vary.scale))
        asked = alike.values() if needed is None else [alike.get(needed, [False])]
        return all_agree(any(map(all, asked)))

    for number in range(count):
        alike: Agreed = {}
        with limited():
            try:
                with made(number) as fn:
                    call_varied(fn, vary, seed, names_of, goes_on=functools.partial(goes_on, alike))
            except (Exception, Refused):  # it may take no such argument; the other ranks may wait for this one's vote
                all_agree(False)
        found.append({part: each for part, each in alike.items() if len(each) == len(mine)})
    return found, time.thread_time() - begun


def explained(
    found: Sequence[Agreed], results: Sequence[tuple[list[Any], list[Any]]], scale: float, *, is_known: bool = False
) -> tuple[str | None, bool]:
    """Return the part of the results that a change explains on all ranks, and whether they tell where they come from.

    "" stands for the whole, None for no part. Of the parts only the first that is wrong counts: others may follow. A
    known wrong version (`is_known`) has right parts before it too, as the answer has.
    """
    for part in dict.fromkeys(name for got, _ in results for result in got for name, _ in parts(result)):
        pairs = [pair for got, want in results for pair in zip(part_of(got, part), part_of(want, part), strict=True)]
        wrong = [mine for mine, right in pairs if not near(mine, right, scale)]
        is_agreed = all(part in of_rank and all(of_rank[part]) for of_rank in found)
        if wrong and is_agreed:
            odd = [one for pair in pairs for one in _odd(*pair, scale)]
            return part, is_evidence(odd)
        if part and (wrong or (is_known and not is_agreed)):
            break
    return None, False


def first_wrong(results: Sequence[tuple[list[Any], list[Any]]], scale: float) -> str:
    """Return the first part that all results have and that is wrong in one; "" for the whole where there is none."""
    every = [[name for name, _ in parts(right) if name] for _, want in results for right in want]
    for part in every[0]:
        pairs = [pair for sides in results for pair in zip(*(part_of(side, part) for side in sides), strict=True)]
        if all(part in names for names in every) and not all(near(mine, right, scale) for mine, right in pairs):
            return part
    return ""


def is_evidence(wrong: Sequence[Any]) -> bool:
    """Whether wrong results tell where they come from: by drawn digits, or whole numbers that are not all alike."""
    if any(isinstance(one, float) and math.isfinite(one) and one != round(one) for one in wrong):
        return True
    if len({str(one) for one in wrong}) < 2:
        return any(isinstance(one, Tensor) and is_telling(one) for one in wrong)
    is_some = any(one is not None and one != 0 for one in wrong if not isinstance(one, Tensor))
    return any(map(is_telling, wrong)) or (len(wrong) >= FEWEST and is_some)


def _odd(mine: Any, right: Any, scale: float) -> list[Any]:
    """Return what of a wrong result is wrong: some of its parts, or the whole."""
    theirs = dict(parts(right))
    odd = [value for name, value in parts(mine) if name and not near(value, theirs.get(name), scale)]
    return odd or ([] if near(mine, right, scale) else [mine])


def part_of(results: Sequence[Any], part: str) -> list[Any]:
    """Return this part of each result, or None where it has none."""
    return [dict(parts(result)).get(part) for result in results]


class _TooLong(RuntimeError):
    """A change made a call that does not end."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
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
