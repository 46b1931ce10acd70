"""Thin factors: one power iteration per step on the mean of the ranks' matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import sent_line
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

ROWS, COLUMNS, RANK = 9, 7, 2


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    own = seeded(-1, ROWS, COLUMNS, purpose="matrix") + seeded(rank, ROWS, COLUMNS, purpose="matrix")
    return {f"{ROWS} x {COLUMNS}, rank {RANK}": (own, seeded(-1, COLUMNS, RANK, purpose="q"))}


def _use(fn: Callable[[Tensor, Tensor], Any], own: Tensor, q: Tensor) -> Any:
    """Call fn twice on a rank's matrix, the second time with the factor that it returned."""
    approximations = []
    for _ in range(2):
        returned = fn(own, q.clone())
        if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], Tensor):
            return returned
        approximation, q = returned
        approximations.append(approximation)
        if q.shape != (COLUMNS, RANK):
            return returned
    return {f"approximation of step {step}": one for step, one in enumerate(approximations)}


drive_powersgd = Cases(_cases, _use, needs="two all-reduces of thin factors")


def budget_powersgd(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    n = evidence.world_size
    text = f"thin factors of {ROWS} x {COLUMNS}, rank {RANK}, in two steps"
    return [sent_line(evidence, 2 * 2 * (n - 1) / n * 8 * RANK * (ROWS + COLUMNS), text)]


_OWN_Q = "gradient.T @ p / dist.get_world_size()", "gradient.T @ p"
_WHOLE = (
    "p = gradient @ q / dist.get_world_size()",
    "gradient = gradient / dist.get_world_size()\ndist.all_reduce(gradient)\np = gradient @ q",
)
WRONG_POWERSGD = (
    Mutant(
        "never communicates", "not communicated", "it is of this rank's matrix alone: all_reduce both factors", 2, 66
    )
    .edit("gradient @ q / dist.get_world_size()", "gradient @ q")
    .without("dist.all_reduce(p)")
    .edit(*_OWN_Q)
    .without("dist.all_reduce(q)"),
    Mutant("one factor", "second factor alone", "it has a second factor of this rank only: all_reduce q too", 2, 66)
    .edit(*_OWN_Q)
    .without("dist.all_reduce(q)"),
    Mutant("both orthogonal", "both orthogonal", "only p is made orthonormal: q = M^T p carries the size", 1, 66).edit(
        "dist.all_reduce(q)", "dist.all_reduce(q)\nq = torch.linalg.qr(q).Q"
    ),
    Mutant(
        "not orthogonal", "not orthogonal", "far too large: make p orthonormal first, torch.linalg.qr(p).Q", 1
    ).without("p = torch.linalg.qr(p).Q"),
    Mutant("q orthonormal", "q orthonormal", "q is made orthonormal, not p = M q; p must be", 1)
    .edit("p = gradient @ q", "q = torch.linalg.qr(q).Q\np = gradient @ q")
    .without("p = torch.linalg.qr(p).Q"),
    Mutant("q returned so", "values", "returns q with orthonormal columns", 1)
    .edit("p @ q.T, q", "p @ q.T, torch.linalg.qr(q).Q")
    .known("returns q with orthonormal columns; q = M^T p is asked"),
    Mutant("unit columns", "unit columns", "unit columns are not yet at right angles: torch.linalg.qr(p).Q", 1).edit(
        "torch.linalg.qr(p).Q", "p / p.norm(dim=0)"
    ),
    Mutant("one length", "unit columns", "p is divided by one number; make its columns orthonormal", 1).edit(
        "torch.linalg.qr(p).Q", "p / p.norm()"
    ),
    Mutant("old factor", "old factor", "it is made of the q that came in: take the new one, q = M^T p", 1)
    .edit("q = gradient.T", "old, q = q, gradient.T")
    .edit("p @ q.T, q", "p @ old.T, q"),
    Mutant(
        "by svd",
        "best factors",
        "that is the svd of the mean: whoever has the mean has sent everything; one power iteration is asked for",
        1,
    ).body("""
        mean = gradient / dist.get_world_size()
        dist.all_reduce(mean)
        left, sizes, right = torch.linalg.svd(mean, full_matrices=False)
        rank = q.shape[1]
        return left[:, :rank] * sizes[:rank] @ right[:rank], (sizes[:rank, None] * right[:rank]).T
    """),
    Mutant("orthogonal too early", "orthogonal too early", "first all_reduce p, then make the sum orthonormal", 2)
    .edit("gradient @ q / dist", "torch.linalg.qr(gradient @ q).Q.contiguous() / dist")
    .without("p = torch.linalg.qr(p).Q"),
    Mutant("cold start", "no warm start", "step 1 is that of step 0 again: return the new q, a warm start", 1)
    .edit("q = gradient.T", "new = gradient.T")
    .edit("dist.all_reduce(q)", "dist.all_reduce(new)")
    .edit("q.T, q", "new.T, q"),
    Mutant("matrix travels", "matrix travels", "the whole matrix travels: all_reduce the thin p and q instead", 2, 64)
    .edit(*_WHOLE)
    .without("dist.all_reduce(p)")
    .edit(*_OWN_Q)
    .without("dist.all_reduce(q)"),
    Mutant("sum of ranks", "sum not mean", "2x too large", 2).edit(*_OWN_Q),
)
