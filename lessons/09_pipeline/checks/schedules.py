"""Orders of a rank in GPipe, 1F1B and a zero-bubble schedule, for a few pipelines: how long, and how much is held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from distlab_lesson_09.checks.orders import SPLIT, WHOLE, Asked, asked_for, judge_each, peak_of

from distlab.grading import Evidence, Fault, Mutant
from distlab.plan import Action

ORDER_CASES = ((4, 8), (2, 3), (3, 7), (4, 2), (1, 3))  # ranks, micro-batches; the widest first: it names faults best
SPLIT_CASES = ((4, 8), (2, 3), (3, 7), (4, 4), (1, 3), (4, 2))


def drive_gpipe(fn: Callable[[int, int], Any]) -> list[list[Any]]:
    """Ask for the order of each rank in each case."""
    return [[fn(rank, count) for rank in range(ranks)] for ranks, count in ORDER_CASES]


def drive_one_f_one_b(fn: Callable[[int, int, int], Any]) -> list[list[Any]]:
    """Ask for the order of each rank in each case."""
    return [[fn(rank, ranks, count) for rank in range(ranks)] for ranks, count in ORDER_CASES]


def drive_zero_bubble(fn: Callable[[int, int, int], Any]) -> list[list[Any]]:
    """Ask for the order of each rank in each case."""
    return [[fn(rank, ranks, count) for rank in range(ranks)] for ranks, count in SPLIT_CASES]


def judge_gpipe(evidence: Evidence) -> Iterator[Fault]:
    """All forward passes, then all backward passes, as short as it can be."""
    yield from judge_each(evidence, ORDER_CASES, WHOLE, look_gpipe)


def look_gpipe(asked: Asked) -> Iterator[Fault]:
    """All forward passes, then all backward passes; as short as it can be."""
    for rank, order in enumerate(asked.orders):
        for early, late in pairwise(order):
            if (early.kind, late.kind) == ("B", "F"):
                first = next(action for action in order if action.kind == "B")
                text = f"{asked.name}: rank {rank} runs {first} before {late}; GPipe runs all forward passes first"
                yield Fault("not GPipe", text)
    yield from _too_long(asked, 3 * (asked.ranks + asked.count - 1), "all ranks must take micro-batches in one order")


def judge_one_f_one_b(evidence: Evidence) -> Iterator[Fault]:
    """As short as GPipe, with as few in flight as 1F1B has."""
    yield from judge_each(evidence, ORDER_CASES, WHOLE, look_one_f_one_b)


def look_one_f_one_b(asked: Asked) -> Iterator[Fault]:
    """As short as GPipe, with as few in flight as 1F1B has."""
    most = [min(asked.ranks - rank, asked.count) for rank in range(asked.ranks)]
    yield from _peaks(asked, most, "1F1B", "start each backward pass as soon as it can run")
    least = 3 * (asked.ranks + asked.count - 1)
    for order in asked.orders:
        for one, other in pairwise(action for action in order if action.kind == "B"):
            if asked.duration > least and one.microbatch > other.microbatch:
                text = f"{asked.name}: rank {one.stage} runs {one} before {other}, and {_slow(asked, least)}"
                yield Fault("newest first", f"{text}: what went forward first comes back first")
    yield from _too_long(asked, least, f"rank r runs {asked.ranks} - 1 - r forward passes before its first pair")


def judge_zero_bubble(evidence: Evidence) -> Iterator[Fault]:
    """W's in the bubbles, and no more in flight than 1F1B has on rank 0."""
    yield from judge_each(evidence, SPLIT_CASES, SPLIT, look_zero_bubble)


def look_zero_bubble(asked: Asked) -> Iterator[Fault]:
    """W's in the bubbles; where there are fewer micro-batches than ranks, no longer than 1F1B."""
    yield from _peaks(asked, [min(asked.ranks, asked.count)] * asked.ranks, "ZB-H1", "run W's earlier")
    pairs = [pair for order in asked.orders for pair in pairwise(order) if pair[0].kind == "I"]
    least = 3 * asked.count + asked.ranks - 1
    if asked.count < asked.ranks:
        least = 3 * (asked.count + asked.ranks - 1)
    if asked.duration > least and all(two == Action(one.stage, "W", one.microbatch) for one, two in pairs):
        text = f"{asked.name}: every W stands right behind its I, as if both were one B: {_slow(asked, least)}"
        yield Fault("W at once", f"{text}; on rank r let r more I's go first")
    yield from _too_long(asked, least, "W's stand where a rank could hand something on: later, rank by rank")


def _peaks(asked: Asked, most: list[int], name: str, advice: str) -> Iterator[Fault]:
    for rank, order in enumerate(asked.orders):
        if (peak := peak_of(order)) > most[rank]:
            text = f"{asked.name}: peak in flight {peak} on rank {rank} where {name} needs {most[rank]}: {advice}"
            yield Fault("peak in flight", text)


def _slow(asked: Asked, least: int) -> str:
    return f"the step takes {asked.duration} units where {least} are enough"


def _too_long(asked: Asked, least: int, advice: str) -> Iterator[Fault]:
    if asked.duration > least:
        yield Fault("too long", f"{asked.name}: {_slow(asked, least)}: {advice}")


def budget_orders(evidence: Evidence) -> list[str]:
    """Say how long the widest case takes and what it holds."""
    split = "W" in "".join(evidence.results[0][0][0])
    asked = asked_for(evidence.results[0][0], ORDER_CASES[0], SPLIT if split else WHOLE)
    assert isinstance(asked, Asked), "it has passed"
    peaks = ", ".join(str(peak_of(order)) for order in asked.orders)
    idle = 1 - 3 * asked.count / asked.duration
    return [f"{asked.name}: {asked.duration} units, bubble {idle:.1%}; in flight {peaks}"]


_SERIAL = "micro-batch 1 enters stage 0 only after micro-batch 0 left stage"
_WARM_UP = "num_ranks - 1 - rank"
_LAST_WEIGHTS = 'f"{rank}W{i}" for i in range(max(num_microbatches - rank, 0), num_microbatches)'

WRONG_GPIPE = (
    Mutant("one by one", "stages never overlap", f"{_SERIAL} 3", 1, 58).edit(
        "forward + backward", "[text for pair in zip(forward, backward) for text in pair]"
    ),
    Mutant("stage 0 everywhere", "wrong stage", "rank 1 holds stage 1", 1).edit("{rank}", "0", times=2),
    Mutant("from 1", "past the end", "micro-batches are 0 to 7", 1).edit("{i}", "{i + 1}", times=2),
    Mutant("one backward", "missing action", "never runs 0B1", 1, 59).edit("+ backward", "+ backward[:1]"),
    Mutant("orders differ", "too long", "in one order", 1, 27).edit(
        "+ backward", "+ (backward[::-1] if rank % 2 else backward)"
    ),
    Mutant("one too early", "not GPipe", "all forward passes first", 1).edit(
        "forward + backward", "forward[:-1] + backward[:1] + forward[-1:] + backward[1:]"
    ),
    Mutant("tuples", "returned", "a list of texts", 1).edit('f"{rank}F{i}"', '(rank, "F", i)'),
    Mutant("halves of backward", "wrong kind", "the kinds here are F, B", 1).edit(
        '[f"{rank}B{i}" for i', '[f"{rank}{kind}{i}" for kind in "IW" for i'
    ),
)
WRONG_ONE_F_ONE_B = (
    Mutant("GPipe", "peak in flight", "8 on rank 0 where 1F1B needs 4", 1).edit(
        f"min({_WARM_UP}, num_microbatches)", "num_microbatches"
    ),
    Mutant("same warm-up", "peak in flight", "4 on rank 1 where 1F1B needs 3", 1).edit(_WARM_UP, "num_ranks - 1"),
    Mutant("no warm-up", "stages never overlap", f"{_SERIAL} 3", 1, 25).edit(_WARM_UP, "0"),
    Mutant("short warm-up", "too long", "- 1 - r forward passes", 1).edit(_WARM_UP, "max(num_ranks - 2 - rank, 0)"),
    Mutant("last rank turned", "deadlock", "no rank can go on", 1, 27).edit(
        "return order", "return order if rank < num_ranks - 1 else [*order[::2], *order[::-2]]"
    ),
    Mutant("runs past the end", "past the end", "micro-batches are 0 to 7", 1)
    .edit(f"min({_WARM_UP}, num_microbatches)", _WARM_UP)
    .edit("if warm_up + i < num_microbatches:", "if True:"),
    Mutant("newest first", "newest first", "comes back first", 1, 27).edit(
        "B{i}", "B{warm_up + i if warm_up + i < num_microbatches else num_microbatches - 1 - i}"
    ),
    Mutant("no minimum", "past the end", "2 micro-batches: rank 0 has 0F2", 1).edit(
        "range(warm_up)", f"range({_WARM_UP})"
    ),
    Mutant("no end", "missing action", "never runs 0B5", 1).edit(
        "range(num_microbatches)", "range(num_microbatches - warm_up)"
    ),
)


def _lagging(mutant: Mutant, lag: str) -> Mutant:
    """Let each W stand so many I's later."""
    later = mutant.edit("i >= rank", f"i >= {lag}").edit("i - rank", f"i - ({lag})")
    return later.edit("num_microbatches - rank", f"num_microbatches - ({lag})")


WRONG_ZERO_BUBBLE = (
    _lagging(Mutant("W at once", "W at once", "takes 30 units where 27 are enough", 1), "0"),
    _lagging(Mutant("W last", "peak in flight", "8 on rank 0 where ZB-H1 needs 4", 1), "num_microbatches"),
    _lagging(Mutant("turned", "peak in flight", "7 on rank 0 where ZB-H1 needs 4", 1), _WARM_UP),
    Mutant("not split", "not split", "write it as I and W", 1).edit("{rank}I{i}", "{rank}B{i}"),
    Mutant("W first", "too early", "0W0 before 0I0", 1)
    .without('order.append(f"{rank}I{i}")')
    .edit('order.append(f"{rank}W{i - rank}")', 'order += [f"{rank}W{i - rank}", f"{rank}I{i}"]'),
    Mutant("W lost", "missing action", "never runs 1W7", 1).without(_LAST_WEIGHTS),
)
