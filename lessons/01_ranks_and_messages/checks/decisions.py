"""Decisions: every rank must stop at the same step, by the mean of all losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from distlab_lesson_01.checks.messages import on_ranks, waiting
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.grading import Evidence, Fault, Mutant

if TYPE_CHECKING:
    from distlab.comm import RankError

NUM_STEPS = 5


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    """Return a rank's loss after each step: falling, and higher on higher ranks; the third mean is low enough."""
    threshold = 1.9 + (n - 1) / 2
    return {
        f"after step {step} (mean loss {4 / step + (n - 1) / 2:.2f}, threshold {threshold:.2f})": (
            torch.tensor(4 / step + rank, dtype=torch.float64),
            threshold,
        )
        for step in range(1, 1 + NUM_STEPS)
    }


def use_repair(fn: Callable[..., Any], loss: Tensor, threshold: float) -> dict[str, Any]:
    """Ask once."""
    answer = fn(loss, threshold)
    return {"whether it stops": bool(answer) if isinstance(answer, Tensor | np.bool_) else answer}


drive_repair = Cases(_cases, use_repair, most_bytes=0)


def failure_repair(error: RankError, world_size: int) -> Fault | None:
    """Name a collective that only some ranks call."""
    text = str(error)
    if "has returned without it" in text or "do not make the same call" in text:
        who = waiting(error) or "one rank waits in a collective"
        advice = "Every rank of the group must call a collective: take it out of the `if`"
        return Fault("not on every rank", f"{on_ranks(world_size)} {who}; the others never call it. {advice}")
    return None


def budget_repair(evidence: Evidence) -> list[str]:
    """Say how many collectives it took."""
    return [f"{evidence.records.num_calls() / evidence.world_size / NUM_STEPS:g} call per step and rank, of one number"]


_SUM, _MEAN = "dist.all_reduce(total)", " / dist.get_world_size()"
WRONG_REPAIR = (
    Mutant(
        "reduce",
        "ranks disagree",
        "rank 0 alone has the sum, so that ranks decide differently, and those that go on wait forever for those that "
        "left; every rank needs the same sum",
        2,
        4,
    ).edit(_SUM, "dist.reduce(total, dst=0)"),
    Mutant("under if", "not on every rank", "out of the `if`", 2, 5, ends=True).edit(
        "dist.all_reduce(", "if dist.get_rank() == 0:\n    dist.all_reduce("
    ),
    Mutant("sum, not mean", "sum compared", "the sum over ranks is compared; divide by world_size", 2, 9).without(
        _MEAN
    ),
    Mutant("own loss", "not communicated", "each rank decides from its own loss alone, and nothing is sent", 2, 20)
    .without(_SUM)
    .without(_MEAN),
    Mutant("overwritten", "changed argument", "it belongs to the caller", 2, 40).edit("loss.clone()", "loss"),
    Mutant("above the threshold", "turned round", "it stops above the threshold; return mean < threshold", 1).edit(
        "< threshold", "> threshold"
    ),
    Mutant("the largest loss", "largest", "the largest loss is divided by the number of ranks; take the sum", 2).edit(
        _SUM, "dist.all_reduce(total, dist.ReduceOp.MAX)"
    ),
    Mutant("the largest alone", "largest", "it stops when every loss is below, the largest too; compare the mean", 3)
    .edit(_SUM, "dist.all_reduce(total, dist.ReduceOp.MAX)")
    .without(_MEAN),
    Mutant("own threshold", "values", "expected", 2, "one set of arguments").edit("< threshold", "< 2.4"),
)
