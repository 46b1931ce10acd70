"""Decisions: every rank must stop at the same step, by the mean of all losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from distlab_lesson_01.checks.messages import on_ranks, waiting
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.cases import Cases
from distlab.grading.variation.draw import Draw, Vary

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


def _use(fn: Callable[..., Any], loss: Tensor, threshold: float) -> dict[str, Any]:
    answer = fn(loss, threshold)
    return {"whether it stops": bool(answer) if isinstance(answer, Tensor | np.bool_) else answer}


def _draw(draw: Draw) -> tuple[Any, ...]:
    shape, dtype = draw.one_of((), (1,)), draw.dtype("float64", "float32")
    kind = draw.one_of("near", "just as large", "a little larger")
    if kind != "near":  # 12 can be divided by any number of ranks; 12.04 and 12.01 are one when rounded
        above = kind == "a little larger"
        return torch.full(shape, 12.04 if above else 12, dtype=dtype), 12.01 if above else 12.0
    return draw.tensor(*shape, dtype=dtype), draw.number(-0.6, 0.6)


drive_repair = Cases(_cases, _use, most_bytes=0)
vary_repair = Vary(
    _draw,
    use=_use,
    least_bytes=0.5,
    left_out={"bytes": "one rank may decide, and send a flag of one byte", "sub-group": "takes no group"}
    | dict.fromkeys(("sizes", "dims", "empty", "layout", "unequal ranks"), "a loss is one number"),
)


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
    Mutant("own threshold", "values", "expected", 2, "one set of arguments").edit("< threshold", "< 2.4"),
)
