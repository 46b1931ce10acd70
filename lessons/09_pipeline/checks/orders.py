"""What any order of actions must keep to: every action once, nothing that waits forever, stages that overlap."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from distlab.grading import Evidence, Fault
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.values import describe
from distlab.plan import Action

WHOLE = {"F": 1, "B": 2}  # how long each kind takes, in units of a forward pass
SPLIT = {"F": 1, "I": 1, "W": 1}
_TEXT = re.compile(r"(\d+)(F|B|I|W)(\d+)")


class Asked(NamedTuple):
    """One case that was asked for, and what comes of all ranks' orders.

    Attributes:
        name: ranks and micro-batches, in words.
        ranks: how many.
        count: how many micro-batches.
        orders: each rank's actions.
        start: of each action.
        end: of each action that could run.
        stuck: the next action of each rank that cannot go on.
    """

    name: str
    ranks: int
    count: int
    orders: list[list[Action]]
    start: dict[Action, int]
    end: dict[Action, int]
    stuck: dict[int, Action]

    @property
    def duration(self) -> int:
        """When the last action ends."""
        return max(self.end.values())


Look = Callable[[Asked], Iterator[Fault]]


def needs_of(action: Action, num_ranks: int) -> list[Action]:
    """Return the actions that must have ended before this one."""
    stage, kind, i = action
    if kind == "F":
        return [Action(stage - 1, "F", i)] if stage else []
    if kind == "W":
        return [Action(stage, "I", i)]
    return [Action(stage, "F", i)] + ([Action(stage + 1, kind, i)] if stage < num_ranks - 1 else [])


def _played(name: str, count: int, orders: list[list[Action]], takes: Mapping[str, int]) -> Asked:
    """Run each action as soon as what it needs has ended; messages take no time."""
    start: dict[Action, int] = {}
    end: dict[Action, int] = {}
    waiting, free, moved = [list(order) for order in orders], [0] * len(orders), True
    while moved:
        moved = False
        for rank, order in enumerate(waiting):
            while order and all(need in end for need in needs_of(order[0], len(orders))):
                action, moved = order.pop(0), True
                start[action] = max([free[rank], *(end[need] for need in needs_of(action, len(orders)))])
                free[rank] = end[action] = start[action] + takes[action.kind]
    stuck = {rank: order[0] for rank, order in enumerate(waiting) if order}
    return Asked(name, len(orders), count, orders, start, end, stuck)


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
        parts = _TEXT.fullmatch(text)
        if parts is None:
            return Fault("no action", f"{who}: {text!r} is no action; write stage, kind, micro-batch, such as '2F0'")
        actions.append(Action(int(parts[1]), parts[2], int(parts[3])))
    return actions


def _incomplete(order: list[Action], rank: int, count: int, kinds: str, who: str) -> Iterator[Fault]:
    """Every action of the rank's stage once, and nothing else."""
    for action in order:
        if action.stage != rank:
            text = f"{who} has {action}, an action of stage {action.stage}; rank {rank} holds stage {rank} and no other"
            yield Fault("wrong stage", text)
    for action in order:
        if action.kind == "B" and "I" in kinds:
            text = f"{who} has a whole backward pass, {action}; write it as I and W, so that W can go where the rank"
            yield Fault("not split", f"{text} would idle")
    for action in order:
        if action.microbatch >= count:
            yield Fault("past the end", f"{who} has {action}, but micro-batches are 0 to {count - 1}")
    for place, action in enumerate(order):
        if action in order[:place]:
            yield Fault("run twice", f"{who} runs {action} twice")
    for action in order:
        if action.kind not in kinds:
            yield Fault("wrong kind", f"{who} has {action}; the kinds here are {', '.join(kinds)}")
    for action in (Action(rank, kind, i) for kind in kinds for i in range(count)):
        if action not in order:
            lost = (
                "its backward pass has nothing to go back on" if action.kind == "F" else "its gradient would be missing"
            )
            yield Fault("missing action", f"{who} never runs {action}: {lost}")
    for place, action in enumerate(order):
        for need in needs_of(action, rank + 1):
            if need.stage == rank and need not in order[:place]:
                yield Fault("too early", f"{who} runs {action} before {need}, which makes what it needs")


def asked_for(texts: list[Any], case: tuple[int, int], takes: Mapping[str, int]) -> Asked | Fault:
    """Check what any order must keep to; return the orders as actions, and how they run."""
    ranks, count = case
    name = f"{ranks} rank{'s' * (ranks > 1)}, {count} micro-batch{'es' * (count > 1)}"
    orders: list[list[Action]] = []
    for rank, order in enumerate(texts):
        who = f"{name}: rank {rank}"
        actions = _parsed(order, who)
        if isinstance(actions, Fault):
            return actions
        for fault in _incomplete(actions, rank, count, "".join(takes), who):
            return fault
        orders.append(actions)
    asked = _played(name, count, orders, takes)
    for rank, action in asked.stuck.items():
        missing = next(need for need in needs_of(action, ranks) if need not in asked.end)
        text = f"{name}: no rank can go on: rank {rank} waits at {action} for {missing}, which rank {missing.stage} has"
        return Fault("deadlock", f"{text} behind {asked.stuck[missing.stage]}")
    return asked


def _serial_fault(asked: Asked) -> Fault | None:
    """Stages that never work at the same time."""
    last, pairs = asked.ranks - 1, list(pairwise(range(asked.count)))
    if last < 1 or any(asked.start[Action(0, "F", j)] < asked.end[Action(last, "F", i)] for i, j in pairs) or not pairs:
        return None
    text = (
        f"{asked.name}: stages never overlap: micro-batch 1 enters stage 0 only after micro-batch 0 left stage {last}"
    )
    return Fault("stages never overlap", f"{text}; rank 0 must not wait for its return")


def judge_each(
    evidence: Evidence, wanted: Sequence[tuple[int, int]], takes: Mapping[str, int], look: Look
) -> Iterator[Fault]:
    """Judge each case."""
    for case, texts in zip(wanted, evidence.results[0], strict=True):
        yield from judge_orders(texts, case, takes, look)


def judge_orders(texts: list[Any], case: tuple[int, int], takes: Mapping[str, int], look: Look) -> Iterator[Fault]:
    """Say what is wrong with the ranks' orders whatever the schedule, then what a schedule's own look finds."""
    asked = asked_for(texts, case, takes)
    if isinstance(asked, Fault):
        yield asked
    else:
        yield from found(_serial_fault(asked))
        yield from look(asked)
