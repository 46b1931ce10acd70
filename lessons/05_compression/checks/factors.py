"""Thin factors: one power iteration per step on the mean of the ranks' matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_05.checks.shared import Known, explain, unchanged
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.traffic import most_sent, over_budget, sent_line
from distlab.grading.diagnosis.values import first_difference_between_ranks, seeded

ROWS, COLUMNS, RANK = 9, 7, 2


def first_factor() -> Tensor:
    """Return the second factor that all ranks begin with."""
    return seeded(-1, COLUMNS, RANK, purpose="q")


def drive_low_rank(fn: Callable[[Tensor, Tensor], Any]) -> dict[str, Any]:
    """Call fn twice on this rank's matrix, the second time with the factor that it returned."""
    own = seeded(-1, ROWS, COLUMNS, purpose="matrix") + seeded(dist.get_rank(), ROWS, COLUMNS, purpose="matrix")
    given, q, approximations = own.clone(), first_factor(), []
    for _ in range(2):
        returned = fn(given, q.clone())
        if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], Tensor):
            return {"returned": repr(returned)[:80]}
        approximation, q = returned
        approximations.append(approximation)
        if q.shape != (COLUMNS, RANK):
            return {"returned": f"a second factor of shape {list(q.shape)}"}
    return {"own": own, "approximations": approximations, "kept": torch.equal(own, given)}


def low_rank_bytes(world_size: int) -> float:
    """Return what two ring all-reduces of the thin factors send, in two steps of float64."""
    return 2 * 2 * (world_size - 1) / world_size * 8 * RANK * (ROWS + COLUMNS)


def judge_low_rank(evidence: Evidence) -> Iterator[Fault]:
    """Two power iterations, the second from the first one's factor, equal on all ranks, for two thin factors."""
    n = evidence.world_size
    for rank, result in enumerate(evidence.results):
        if "returned" in result:
            text = f"rank {rank} returned {result['returned']}"
            yield Fault("returned", f"{text}; expected the approximation [R, C] and the second factor [C, r]")
    own = [result["own"] for result in evidence.results]
    mean, q = torch.stack(own).mean(0), first_factor()
    for step in range(2):
        for rank, result in enumerate(evidence.results):
            known = _factor_mistakes(own, rank, q, step)
            got, what = result["approximations"][step], f"rank {rank}: the approximation of step {step}"
            yield from found(explain(got, _project(mean, q), known, what, n))
        q = mean.T @ torch.linalg.qr(mean @ q).Q
    approximations = [result["approximations"] for result in evidence.results]
    yield from found(first_difference_between_ranks(approximations, "approximation"))
    yield from unchanged([result["kept"] for result in evidence.results])
    wanted = low_rank_bytes(n)
    whole = 2 * 2 * (n - 1) / n * 8 * ROWS * COLUMNS
    if n > 1 and most_sent(evidence) >= 0.99 * whole:
        text = f"right values, but a matrix of {ROWS} x {COLUMNS} travelled: nothing is saved"
        yield Fault("matrix travels", f"{text}; all_reduce p and q, the thin factors, and multiply after that")
    yield from found(over_budget(evidence, wanted, "two all-reduces of thin factors"))


def _project(matrix: Tensor, q: Tensor) -> Tensor:
    p = torch.linalg.qr(matrix @ q).Q
    return p @ p.T @ matrix


def _factor_mistakes(own: Sequence[Tensor], rank: int, q: Tensor, step: int) -> Known:
    mean, n = torch.stack(list(own)).mean(0), len(own)
    p, mine = torch.linalg.qr(mean @ q).Q, own[rank]
    early = torch.stack([torch.linalg.qr(matrix @ q).Q for matrix in own]).mean(0)
    thin = torch.linalg.qr(mean.T @ p).Q
    left, sizes, right = torch.linalg.svd(mean, full_matrices=False)
    best = (left[:, :RANK] * sizes[:RANK]) @ right[:RANK]
    unit = torch.nn.functional.normalize(mean @ q, dim=0)
    alone = "is made from this rank's matrix alone: replicas drift apart; all_reduce both factors"
    large = "is far too large: p was not made orthonormal, so p p^T is not a projection; torch.linalg.qr(p).Q"
    angles = "is made with columns of length 1 that are not at right angles: what they share counts more than once;"
    svd = "is the best of its rank, by svd of the mean: whoever has the mean has sent everything before; one power"
    no_size = "has lost the size of the gradient: only p is made orthonormal, q = M^T p carries the size"
    bases = "adds bases that were made orthonormal on each rank: first all_reduce p, then make it orthonormal"
    cold = "is that of step 0 again: return the new q, so that the next step goes on from it (warm start)"
    known = [
        ("not communicated", _project(mine, q), alone),
        ("second factor alone", p @ (mine.T @ p).T, "has a second factor of this rank only: all_reduce q too"),
        ("not orthogonal", mean @ q @ (mean.T @ mean @ q).T, large),
        ("unit columns", unit @ (mean.T @ unit).T, f"{angles} torch.linalg.qr(p).Q"),
        ("old factor", p @ q.T, "is made of p and the q that came in: the new one is q = M^T p, with the new p"),
        ("best factors", best, f"{svd} iteration from the q that came in is asked for"),
        ("both orthogonal", p @ thin.T, no_size),
        ("orthogonal too early", early @ (mean.T @ early).T, bases),
        ("sum not mean", n * p @ p.T @ mean, f"is {n}x too large: divide by world_size ({n})"),
        ("sum not mean, early", n * n * p @ p.T @ mean, f"is {n * n}x too large: divide by world_size ({n})"),
    ]
    return known if step == 0 else [*known, ("no warm start", _project(mean, first_factor()), cold)]


def budget_low_rank(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    text = f"thin factors of {ROWS} x {COLUMNS}, rank {RANK}, in two steps"
    return [sent_line(evidence, low_rank_bytes(evidence.world_size), text)]


_OWN_Q = "gradient.T @ p / dist.get_world_size()", "gradient.T @ p"
WRONG_FACTORS = (
    Mutant("never communicates", "not communicated", "replicas drift apart", 2, 66)
    .edit("gradient @ q / dist.get_world_size()", "gradient @ q")
    .without("dist.all_reduce(p)")
    .edit(*_OWN_Q)
    .without("dist.all_reduce(q)"),
    Mutant("one factor", "second factor alone", "all_reduce q too", 2, 66).edit(*_OWN_Q).without("dist.all_reduce(q)"),
    Mutant("both orthogonal", "both orthogonal", "lost the size", 1, 66).edit(
        "dist.all_reduce(q)", "dist.all_reduce(q)\nq = torch.linalg.qr(q).Q"
    ),
    Mutant("not orthogonal", "not orthogonal", "not a projection", 1).without("p = torch.linalg.qr(p).Q"),
    Mutant("orthogonal too early", "orthogonal too early", "first all_reduce p", 2)
    .edit("gradient @ q / dist", "torch.linalg.qr(gradient @ q).Q.contiguous() / dist")
    .without("p = torch.linalg.qr(p).Q"),
    Mutant("cold start", "no warm start", "return the new q", 1)
    .edit("q = gradient.T", "new = gradient.T")
    .edit("dist.all_reduce(q)", "dist.all_reduce(new)")
    .edit("q.T, q", "new.T, q"),
    Mutant("matrix travels", "matrix travels", "the thin factors", 2, 64)
    .edit(
        "p = gradient @ q / dist.get_world_size()",
        "gradient = gradient / dist.get_world_size()\ndist.all_reduce(gradient)\np = gradient @ q",
    )
    .without("dist.all_reduce(p)")
    .edit(*_OWN_Q)
    .without("dist.all_reduce(q)"),
)
