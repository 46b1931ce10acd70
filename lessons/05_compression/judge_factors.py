"""Name what is wrong in the thin factors of lesson 5's checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from distlab_lesson_05 import cases
from distlab_lesson_05.judges import explain, unchanged
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.traffic import over_budget, sent_bytes, sent_line
from distlab.grading.values import first_difference_between_ranks


def low_rank_bytes(world_size: int) -> float:
    """Return what two ring all-reduces of the thin factors send, in two steps of float64."""
    return 2 * 2 * (world_size - 1) / world_size * 8 * cases.RANK * (cases.ROWS + cases.COLUMNS)


def judge_low_rank(evidence: Evidence) -> Iterator[Fault]:
    """Two power iterations, the second from the first one's factor, equal on all ranks, for two thin factors."""
    n = evidence.world_size
    for rank, result in enumerate(evidence.results):
        if "returned" in result:
            text = f"rank {rank} returned {result['returned']}"
            yield Fault("returned", f"{text}; expected the approximation [R, C] and the second factor [C, r]")
            return
    own = [result["own"] for result in evidence.results]
    mean, q = torch.stack(own).mean(0), cases.first_factor()
    for step in range(2):
        for rank, result in enumerate(evidence.results):
            known = _factor_mistakes(own, rank, q, step)
            what = f"the approximation of step {step}"
            fault = explain(result["approximations"][step], _project(mean, q), known, what=what, world_size=n)
            if fault is not None:
                yield Fault(fault.code, f"rank {rank}: {fault.message}")
                return
        q = mean.T @ torch.linalg.qr(mean @ q).Q
    approximations = [result["approximations"] for result in evidence.results]
    fault = first_difference_between_ranks(approximations, "approximation")
    if fault is not None:
        yield fault
        return
    yield from unchanged([result["kept"] for result in evidence.results])
    wanted = low_rank_bytes(n)
    whole = 2 * 2 * (n - 1) / n * 8 * cases.ROWS * cases.COLUMNS
    if n > 1 and max(sent_bytes(evidence, rank) for rank in evidence.records.ranks) >= 0.99 * whole:
        text = f"right values, but a matrix of {cases.ROWS} x {cases.COLUMNS} travelled: nothing is saved"
        yield Fault("matrix travels", f"{text}; all_reduce p and q, the thin factors, and multiply after that")
        return
    over = over_budget(evidence, wanted, "two all-reduces of thin factors")
    if over is not None:
        yield over


def _project(matrix: Tensor, q: Tensor) -> Tensor:
    p = torch.linalg.qr(matrix @ q).Q
    return p @ p.T @ matrix


def _factor_mistakes(own: Sequence[Tensor], rank: int, q: Tensor, step: int) -> dict[str, tuple[Tensor, str]]:
    mean, n = torch.stack(list(own)).mean(0), len(own)
    p, mine = torch.linalg.qr(mean @ q).Q, own[rank]
    early = torch.stack([torch.linalg.qr(matrix @ q).Q for matrix in own]).mean(0)
    thin = torch.linalg.qr(mean.T @ p).Q
    first = _project(mean, cases.first_factor())
    left, sizes, right = torch.linalg.svd(mean, full_matrices=False)
    unit = torch.nn.functional.normalize(mean @ q, dim=0)
    alone = "is made from this rank's matrix alone: replicas drift apart; all_reduce both factors"
    known = {
        "not communicated": (_project(mine, q), alone),
        "second factor alone": (p @ (mine.T @ p).T, "has a second factor of this rank only: all_reduce q too"),
        "not orthogonal": (
            mean @ q @ (mean.T @ mean @ q).T,
            "is far too large: p was not made orthonormal, so p p^T is no projection; torch.linalg.qr(p).Q",
        ),
        "unit columns": (
            unit @ (mean.T @ unit).T,
            "is made with columns of length 1 that are not at right angles: what they share counts more than once;"
            " torch.linalg.qr(p).Q",
        ),
        "old factor": (p @ q.T, "is made of p and the q that came in: the new one is q = M^T p, with the new p"),
        "best factors": (
            (left[:, : cases.RANK] * sizes[: cases.RANK]) @ right[: cases.RANK],
            "is the best of its rank, by svd of the mean: whoever has the mean has sent everything before; asked is one"
            " power iteration from the q that came in",
        ),
        "both orthogonal": (
            p @ thin.T,
            "has lost the size of the gradient: only p is made orthonormal, q = M^T p carries the size",
        ),
        "orthogonal too early": (
            early @ (mean.T @ early).T,
            "adds bases that were made orthonormal on each rank: first all_reduce p, then make it orthonormal",
        ),
        "sum not mean": (n * p @ p.T @ mean, f"is {n}x too large: divide by world_size ({n})"),
        "sum not mean, early": (n * n * p @ p.T @ mean, f"is {n * n}x too large: divide by world_size ({n})"),
    }
    if step == 1:
        words = "is that of step 0 again: return the new q, so that the next step goes on from it (warm start)"
        known["no warm start"] = (first, words)
    return known


def budget_low_rank(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    text = f"thin factors of {cases.ROWS} x {cases.COLUMNS}, rank {cases.RANK}, in two steps"
    return [sent_line(evidence, low_rank_bytes(evidence.world_size), text)]
