"""Name what is wrong with an order of actions: what is missing, what waits for ever, what idles, what is held."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from distlab_lesson_09 import cases

from distlab.grading import Evidence, Fault
from distlab.grading.values import describe
from distlab.plan import Action

WHOLE = {"F": 1, "B": 2}  # how long each kind takes, in units of a forward pass
SPLIT = {"F": 1, "I": 1, "W": 1}
_TEXT = re.compile(r"(\d+)(F|B|I|W)(\d+)")


class Played(NamedTuple):
    """What comes of all ranks' orders.

    Attributes:
        start: of each action.
        end: of each action that could run.
        duration: of the step.
        stuck: the next action of each rank that cannot go on.
    """

    start: dict[Action, int]
    end: dict[Action, int]
    duration: int
    stuck: dict[int, Action]


def needs_of(action: Action, num_ranks: int) -> list[Action]:
    """Return the actions that must have ended before this one."""
    stage, kind, i = action
    if kind == "F":
        return [Action(stage - 1, "F", i)] if stage else []
    if kind == "W":
        return [Action(stage, "I", i)]
    return [Action(stage, "F", i)] + ([Action(stage + 1, kind, i)] if stage < num_ranks - 1 else [])


def play(orders: list[list[Action]], takes: Mapping[str, int]) -> Played:
    """Run the orders as soon as what they need has ended; messages take no time."""
    start: dict[Action, int] = {}
    end: dict[Action, int] = {}
    at, free, moved = [0] * len(orders), [0] * len(orders), True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                needs = needs_of(order[at[rank]], len(orders))
                if not all(need in end for need in needs):
                    break
                start[order[at[rank]]] = max([free[rank], *(end[need] for need in needs)])
                free[rank] = end[order[at[rank]]] = start[order[at[rank]]] + takes[order[at[rank]].kind]
                at[rank], moved = at[rank] + 1, True
    stuck = {rank: order[at[rank]] for rank, order in enumerate(orders) if at[rank] < len(order)}
    return Played(start, end, max(free), stuck)


def peak_of(order: list[Action]) -> int:
    """Return the most micro-batches that a rank holds: from F to B, or to W."""
    held = most = 0
    for action in order:
        held += (action.kind == "F") - (action.kind in "BW")
        most = max(most, held)
    return most


def _parsed(order: Any, who: str) -> list[Action] | Fault:
    if not isinstance(order, list | tuple) or not all(isinstance(text, str) for text in order):
        return Fault("returned", f"{who}: expected a list of texts such as '2F0', got {describe(order)}")
    actions = []
    for text in order:
        found = _TEXT.fullmatch(text)
        if found is None:
            return Fault("no action", f"{who}: {text!r} is no action; write stage, kind, micro-batch, such as '2F0'")
        actions.append(Action(int(found[1]), found[2], int(found[3])))
    return actions


def _complete(order: list[Action], rank: int, count: int, kinds: str, who: str) -> Fault | None:
    """Every action of the rank's stage once, and nothing else."""
    other = next((action for action in order if action.stage != rank), None)
    if other is not None:
        text = f"{who} has {other}, an action of stage {other.stage}; rank {rank} holds stage {rank} and no other"
        return Fault("wrong stage", text)
    if "I" in kinds and any(action.kind == "B" for action in order):
        text = f"{who} has a whole backward pass, {next(action for action in order if action.kind == 'B')}"
        return Fault("not split", f"{text}; write it as I and W, so that W can go where the rank would idle")
    past = next((action for action in order if action.microbatch >= count), None)
    if past is not None:
        return Fault("past the end", f"{who} has {past}, but micro-batches are 0 to {count - 1}")
    twice = next((action for k, action in enumerate(order) if action in order[:k]), None)
    if twice is not None:
        return Fault("run twice", f"{who} runs {twice} twice")
    stray = next((action for action in order if action.kind not in kinds), None)
    if stray is not None:
        return Fault("wrong kind", f"{who} has {stray}; the kinds here are {', '.join(kinds)}")
    for kind in kinds:
        for i in range(count):
            if Action(rank, kind, i) not in order:
                lost = "its gradient would be missing" if kind != "F" else "its backward pass has nothing to go back on"
                return Fault("missing action", f"{who} never runs {Action(rank, kind, i)}: {lost}")
    for place, action in enumerate(order):
        before = [need for need in needs_of(action, rank + 1) if need.stage == rank and need not in order[:place]]
        if before:
            return Fault("too early", f"{who} runs {action} before {before[0]}, which makes what it needs")
    return None


def orders_fault(
    orders: list[Any], case: tuple[int, int], takes: Mapping[str, int]
) -> Fault | tuple[list[list[Action]], Played]:
    """Check what any order must keep to; return the orders as actions, and how they run."""
    ranks, count = case
    found: list[list[Action]] = []
    for rank, order in enumerate(orders):
        who = f"{ranks} ranks, {count} micro-batches: rank {rank}"
        actions = _parsed(order, who)
        if isinstance(actions, Fault):
            return actions
        fault = _complete(actions, rank, count, "".join(takes), who)
        if fault is not None:
            return fault
        found.append(actions)
    played = play(found, takes)
    if played.stuck:
        rank, action = next(iter(played.stuck.items()))
        missing = next(need for need in needs_of(action, ranks) if need not in played.end)
        text = f"{ranks} ranks, {count} micro-batches: nobody can go on: rank {rank} waits at {action} for {missing}"
        return Fault("deadlock", f"{text}, which rank {missing.stage} has behind {played.stuck[missing.stage]}")
    return found, played


def serial_fault(played: Played, case: tuple[int, int]) -> Fault | None:
    """Stages that never work at the same time."""
    ranks, count = case
    if ranks < 2 or count < 2:
        return None
    last = ranks - 1
    for i in range(count - 1):
        if played.start[Action(0, "F", i + 1)] < played.end[Action(last, "F", i)]:
            return None
    text = f"{ranks} ranks, {count} micro-batches: stages never overlap: micro-batch 1 enters stage 0 only after"
    return Fault("stages never overlap", f"{text} micro-batch 0 left stage {last}; rank 0 must not wait for its return")


class Asked(NamedTuple):
    """One case that was asked for: how many ranks and micro-batches, their orders, and how these run."""

    ranks: int
    count: int
    orders: list[list[Action]]
    played: Played

    @property
    def case(self) -> tuple[int, int]:
        """Ranks and micro-batches."""
        return self.ranks, self.count


def _each_case(
    evidence: Evidence, wanted: Sequence[tuple[int, int]], takes: Mapping[str, int]
) -> Iterator[Asked | Fault]:
    """Yield each case that can run, and what is wrong with it whatever the schedule; end at one that cannot run."""
    for case, orders in zip(wanted, evidence.results[0], strict=True):
        got = orders_fault(orders, case, takes)
        if isinstance(got, Fault):
            yield got
            return
        if (fault := serial_fault(got[1], case)) is not None:
            yield fault
        yield Asked(*case, *got)


def judge_gpipe(evidence: Evidence) -> Iterator[Fault]:
    """All forward passes, then all backward passes, as short as it can be."""
    for asked in _each_case(evidence, cases.ORDER_CASES, WHOLE):
        if isinstance(asked, Fault):
            yield asked
            continue
        case, played = asked.case, asked.played
        for rank, order in enumerate(asked.orders):
            kinds = [action.kind for action in order]
            if "F" in kinds[kinds.index("B") :]:
                early = order[kinds.index("B")]
                late = next(action for action in order[kinds.index("B") :] if action.kind == "F")
                text = f"{case[0]} ranks, {case[1]} micro-batches: rank {rank} runs {early} before {late}"
                yield Fault("not GPipe", f"{text}; GPipe runs all forward passes first")
        yield from _length_fault(played, case, 3 * (sum(case) - 1), "all ranks must take micro-batches in one order")


def judge_one_f_one_b(evidence: Evidence) -> Iterator[Fault]:
    """As short as GPipe, with as few in flight as 1F1B has."""
    for asked in _each_case(evidence, cases.ORDER_CASES, WHOLE):
        if isinstance(asked, Fault):
            yield asked
            continue
        ranks, count, found, played = asked
        case = asked.case
        for rank, order in enumerate(found):
            yield from _peak_fault(order, rank, case, min(ranks - rank, count))
        least = 3 * (ranks + count - 1)
        if played.duration > least and (turned := _newest_first(found)) is not None:
            text = (
                f"{ranks} ranks, {count} micro-batches: rank {turned[0].stage} runs {turned[0]} before {turned[1]}, and"
            )
            text = f"{text} the step takes {played.duration} units where {least} are enough"
            yield Fault("newest first", f"{text}: what went forward first comes back first")
        yield from _length_fault(
            played, case, least, f"rank r runs {ranks} - 1 - r forward passes before its first pair"
        )


def _newest_first(orders: list[list[Action]]) -> tuple[Action, Action] | None:
    """Return two neighbouring backward passes that do not go by micro-batch, if there are such."""
    for order in orders:
        backward = [action for action in order if action.kind == "B"]
        for one, other in pairwise(backward):
            if one.microbatch > other.microbatch:
                return one, other
    return None


def _peak_fault(
    order: list[Action], rank: int, case: tuple[int, int], most: int, name: str = "1F1B"
) -> Iterator[Fault]:
    peak = peak_of(order)
    if peak > most:
        text = (
            f"{case[0]} ranks, {case[1]} micro-batches: peak in flight {peak} on rank {rank} where {name} needs {most}"
        )
        advice = "start each backward pass as soon as it can run" if name == "1F1B" else "run W's earlier"
        yield Fault("peak in flight", f"{text}: {advice}")


def _length_fault(played: Played, case: tuple[int, int], least: int, advice: str) -> Iterator[Fault]:
    if played.duration > least:
        text = (
            f"{case[0]} ranks, {case[1]} micro-batches: the step takes {played.duration} units where {least} are enough"
        )
        yield Fault("too long", f"{text}: {advice}")


def judge_zero_bubble(evidence: Evidence) -> Iterator[Fault]:
    """W's in the bubbles, and no more in flight than 1F1B has on rank 0."""
    for asked in _each_case(evidence, cases.SPLIT_CASES, SPLIT):
        if isinstance(asked, Fault):
            yield asked
            continue
        ranks, count, found, played = asked
        case = asked.case
        for rank, order in enumerate(found):
            yield from _peak_fault(order, rank, case, min(ranks, count), "ZB-H1")
        at_once = all(
            order[place + 1] == Action(action.stage, "W", action.microbatch)
            for order in found
            for place, action in enumerate(order)
            if action.kind == "I"
        )
        least = 3 * count + ranks - 1
        if at_once and played.duration > least:
            text = (
                f"{ranks} ranks, {count} micro-batches: every W stands right behind its I, as if both were one B: the"
            )
            text = f"{text} step takes {played.duration} units where {least} are enough"
            yield Fault("W at once", f"{text}; on rank r let r more I's go first")
        yield from _length_fault(
            played, case, least, "W's stand where a rank could hand something on: later, rank by rank"
        )


def budget_orders(evidence: Evidence) -> list[str]:
    """Say how long the widest case takes and what it holds."""
    split = "W" in "".join(evidence.results[0][0][0])
    case = cases.ORDER_CASES[0]
    got = orders_fault(evidence.results[0][0], case, SPLIT if split else WHOLE)
    assert not isinstance(got, Fault), "it has passed"
    found, played = got
    idle = 1 - 3 * case[1] / played.duration
    peaks = ", ".join(str(peak_of(order)) for order in found)
    return [f"{case[0]} ranks, {case[1]} micro-batches: {played.duration} units, bubble {idle:.1%}; in flight {peaks}"]
