"""The outer step: replicas that have trained alone agree on their mean change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls, sent_line
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

LENGTH, MEETINGS, RATES, FACTOR = 50, 3, (0.7, 0.7, 0.3), 0.9


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    start = seeded(-1, LENGTH, purpose="agreed")
    learned = [seeded(rank, LENGTH, purpose=f"round {number}") for number in range(MEETINGS)]
    return {f"{MEETINGS} meetings": (start, learned)}


def _use(fn: Callable[..., Any], start: Tensor, learned: list[Tensor]) -> dict[str, Any]:
    """Let a replica learn something of its own before each meeting; write down what each meeting leaves."""
    own, agreed, momentum, seen = start.clone(), start.clone(), torch.zeros_like(start), {}
    for number, (change, lr) in enumerate(zip(learned, RATES, strict=True), 1):
        own.add_(change)
        fn(own, agreed, momentum, lr, FACTOR)
        where = f"after meeting {number}"
        seen[f"momentum {where}"] = momentum.clone()
        seen |= {f"agreed values {where}": agreed.clone(), f"own values {where}": own.clone()}
    return seen


drive_outer = Cases(_cases, _use, needs="an all-reduce of the change in each meeting")


def budget_outer(evidence: Evidence) -> list[str]:
    """Say what was sent, and in how many calls."""
    n = evidence.world_size
    line = sent_line(evidence, MEETINGS * 2 * (n - 1) / n * 8 * LENGTH, f"the changes of {MEETINGS} meetings")
    return [line, f"{len(calls(evidence, 0))} calls per rank in {MEETINGS} meetings"]


_CHANGE = "change = (agreed - own) / dist.get_world_size()"
_SUM = "dist.all_reduce(change)"
_REMEMBERS = "momentum.mul_(factor).add_(change)"
_NESTEROV = "lr * (change + factor * momentum)"
_BACK = "own.copy_(agreed)"
_ALONE = "it steps by this rank's own change: all_reduce it, or the replicas never agree"
_GATHERED = """
everyone = [torch.empty_like(change) for _ in range(dist.get_world_size())]
dist.all_gather(everyone, change)
change = torch.stack(everyone).sum(0)
""".strip()
_ONE_EDIT = (
    ("uphill", "the change is agreed - own: uphill, as a gradient; subtract the step", "agreed - own", "own - agreed"),
    (
        "plain momentum",
        "that is plain momentum, or the old one: update it, then add the change once more",
        _NESTEROV,
        "lr * momentum",
    ),
    ("momentum unused", "the step takes the change alone, without its momentum", _NESTEROV, "lr * change"),
    ("mean of the replicas", "that is the mean of the replicas, local SGD: make the outer step", _NESTEROV, "change"),
    ("no rate", "the step lacks its rate, lr", "lr * (change", "(change"),
    ("own not brought back", "the own values stay where they were: copy the agreed ones", _BACK, ""),
    ("steps from own", "the step starts at the own values, not at the agreed ones", ".sub_(lr", ".copy_(own).sub_(lr"),
    ("damped", "the change enters the momentum whole, not times 1 - factor", "add_(ch", "add_((1 - factor) * ch"),
    (
        *(
            "momentum not kept",
            "the caller's momentum stays as it was: write into it, mul_ and add_ (`momentum = ...` names a new tensor)",
        ),
        *(_REMEMBERS, "momentum = factor * momentum + change"),
    ),
)
WRONG_OUTER = (
    *(Mutant(fault, fault, says, 1).edit(old, new) for fault, says, old, new in _ONE_EDIT),
    Mutant("sum", "sum not mean", "divide by world_size (2)", 2, 9).without(" / dist.get_world_size()"),
    Mutant("own change", "not communicated", _ALONE, 2).without(" / dist.get_world_size()").without(_SUM),
    Mutant("sum of values", "values not averaged", "the sum of the own values is taken for their mean", 2).edit(
        f"{_CHANGE}\n{_SUM}", "dist.all_reduce(own)\nchange = agreed - own"
    ),
    Mutant(
        "returned", "nothing written", "nothing is written: the caller keeps all three tensors, write into them", 1
    ).body(f"{_CHANGE}\n{_SUM}\nmomentum = factor * momentum + change\nreturn agreed - {_NESTEROV}, momentum"),
    Mutant("own momentum", "own change remembered", "the momentum is of this rank's own change: all_reduce first", 2)
    .without(_SUM)
    .without(" / dist.get_world_size()")
    .edit(_BACK, f"agreed /= dist.get_world_size()\ndist.all_reduce(agreed)\n{_BACK}"),
    Mutant("agreed values stay", "agreed not moved", "the agreed values stay as they were: write the step into them", 1)
    .edit(f"agreed.sub_({_NESTEROV})", f"own.copy_(agreed - {_NESTEROV})")
    .without(f"\n{_BACK}"),
    Mutant("rate inside", "rate in the momentum", "its momentum holds the rate, which may change: keep lr out", 1)
    .edit(_REMEMBERS, "momentum.mul_(factor).add_(lr * change)")
    .edit(_NESTEROV, "lr * change + factor * momentum"),
    Mutant("gathered", "changes gathered", "all changes come to each rank: all_reduce their sum", 3).edit(
        _SUM, _GATHERED
    ),
    Mutant(
        "two all-reduces", "sent twice", "the new values travel too: all ranks compute the same, send the change", 2
    ).edit(_BACK, "own.copy_(agreed / dist.get_world_size())\ndist.all_reduce(own)"),
)
