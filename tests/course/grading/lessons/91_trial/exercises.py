"""Exercises of a small lesson that tests use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from distlab.course.grading import Evidence, Exercise, Fault, Mutant
from distlab.course.grading.diagnosis.provenance import explain_sum
from distlab.course.grading.diagnosis.traffic import over_budget, sent_line
from distlab.course.grading.diagnosis.values import compare, seeded

TITLE = "Trial"
MINUTES = 5
NEEDS: tuple[str, ...] = ()
AIMS = ("try out the checks",)
SIZE = 100


def drive_mean(fn: Callable[..., Any]) -> Any:
    """Call the function on this rank's tensor."""
    return fn(seeded(dist.get_rank(), SIZE))


def judge_mean(evidence: Evidence) -> Iterator[Fault]:
    """Look at each rank's mean."""
    n = evidence.world_size
    parts = [seeded(rank, SIZE) for rank in range(n)]

    def look(rank: int, result: Any) -> Fault | None:
        return explain_sum(result, parts, expected=[1 / n] * n, what=f"rank {rank}'s result", rank=rank)

    yield from filter(None, map(look, range(n), evidence.results))
    yield from filter(None, [over_budget(evidence, 2 * (n - 1) / n * SIZE * 8, "a ring")])


def budget_mean(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    n = evidence.world_size
    return [sent_line(evidence, 2 * (n - 1) / n * SIZE * 8, "a ring")]


def drive_double(fn: Callable[..., Any]) -> Any:
    """Call the function."""
    return fn([1.0, 2.5]), fn([3.0], times=3)


def judge_double(evidence: Evidence) -> Iterator[Fault]:
    """Compare with the reference."""
    yield from filter(None, [compare(evidence.results[0], ([2.0, 5.0], [9.0]), "double's result")])


HINTS = ("Which operation adds?", "Divide by what?", "Clone, all_reduce, divide by world_size.")
SUM = Mutant("sum", "sum not mean", "divide by world_size", 3, 9).edit("total / dist.get_world_size()", "total")
MEAN = Exercise(
    name="91.mean",
    title="the mean of all ranks' tensors",
    minutes=5,
    difficulty=1,
    source="solutions:mean",
    drive=drive_mean,
    judge=judge_mean,
    imports=("import torch", "import torch.distributed as dist"),
    hints=HINTS,
    budget=budget_mean,
    mutants=(SUM,),
)
DOUBLE = Exercise("91.double", "every value times two", 2, 1, "solutions:double", drive_double, judge_double)
EXERCISES = (
    MEAN,
    replace(DOUBLE, hints=HINTS, worlds=(1,)),
    replace(MEAN, name="91.repair", title="repair the mean", minutes=4, difficulty=2, budget=None, broken="sum"),
)
