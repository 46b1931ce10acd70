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

THRESHOLD = 3.0
LOSSES = (  # of ranks 0 to 3: no two rules decide alike on all of them
    (8.0, 2.0, 1.5, 7.0),
    (3.0, 1.0, 0.5, 0.5),
    (1.5, 0.25, 1.5, 2.5),
    (4.0, 5.0, 1.5, 6.0),
    (6.0, 7.0, 6.0, 5.0),
    (2.5, 2.5, 4.0, 0.5),
    (2.0, 4.0, 2.0, 4.0),
)
NUM_STEPS = len(LOSSES)


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    """Return a rank's loss after each step."""
    return {
        f"losses {', '.join(map(str, losses[:n]))} (mean {sum(losses[:n]) / n:.2f}), threshold {THRESHOLD}": (
            torch.tensor(losses[rank], dtype=torch.float64),
            THRESHOLD,
        )
        for losses in LOSSES
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
    *(
        Mutant(name, name, f"{says}; compare the mean of all ranks' losses", 2).edit(_SUM, new).without(_MEAN)
        for name, says, new in (
            ("any rank", "it stops as soon as one rank's loss is below", "dist.all_reduce(total, dist.ReduceOp.MIN)"),
            ("rank 0's loss", "rank 0's loss alone decides", "dist.broadcast(total, src=0)"),
            ("the last rank's", "the last rank's loss decides", "dist.broadcast(total, dist.get_world_size() - 1)"),
        )
    ),
    Mutant("majority", "majority", "ranks vote, each on its own loss; compare the mean of their losses", 3)
    .edit("() < threshold", "() > 0.5")
    .edit("loss.clone()", "(loss < threshold).double()"),
    Mutant("at the threshold", "at the threshold", "it stops at the threshold, too; below it is asked: <", 1).edit(
        "< threshold", "<= threshold"
    ),
    Mutant("own threshold", "values", "expected", 2, "one set of arguments").edit("< threshold", "< 3.0"),
)
