"""How long a check of a trivial answer takes: a right one on 1, 2, 3 and 4 ranks, and a wrong one.

Every number of ranks gets processes of its own, ten in all, which are started, joined in a group and killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from _rows import Row, absolute
from _script import run_script

from distlab.comm import run
from distlab.comm.launch.fork_client import shut_down
from distlab.course.grading import Evidence, Exercise, Fault, Report
from distlab.course.grading.check import examine
from distlab.course.grading.diagnosis.provenance import explain_sum
from distlab.course.grading.diagnosis.values import seeded

SIZE = 100


def drive(fn: Callable[..., Any]) -> Any:
    tensor = seeded(dist.get_rank(), SIZE)
    fn(tensor)
    return tensor


def judge(evidence: Evidence) -> Iterator[Fault]:
    n = evidence.world_size
    parts = [seeded(rank, SIZE) for rank in range(n)]
    for rank, result in enumerate(evidence.results):
        fault = explain_sum(result, parts, expected=[1.0] * n, rank=rank)
        if fault is not None:
            yield fault


def right(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


EXERCISE = Exercise(
    name="00.sum",
    title="the sum over ranks",
    minutes=1,
    difficulty=1,
    source=f"{__name__}:right",
    drive=drive,
    judge=judge,
)


def wrong(tensor: torch.Tensor) -> None:
    tensor += dist.get_rank()


def seconds(fn: Callable[..., Any], verdict: str) -> float:
    report: Report = examine(EXERCISE, fn)
    assert report.verdict == verdict, str(report)
    return report.seconds


def rows(quick: bool = False) -> Iterator[Row]:
    """Measure; quick takes few repeats."""
    repeats = 3 if quick else 20
    run(dist.get_rank, 2)  # loads torch for the ranks
    seconds(right, "passed")
    try:
        claim = "a check of a trivial right answer on 1, 2, 3 and 4 ranks, warm"
        yield absolute(claim, [seconds(right, "passed") for _ in range(repeats)], bar=0.5, unit="s")
        claim = "a check of a trivial wrong answer, told on 2 ranks, warm"
        yield absolute(claim, [seconds(wrong, "wrong") for _ in range(repeats)], bar=0.5, unit="s")
    finally:
        shut_down()


if __name__ == "__main__":
    run_script(__doc__, rows)
