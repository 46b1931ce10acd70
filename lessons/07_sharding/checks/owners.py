"""Optimizers that need whole matrices: who owns which, and an update that the owners compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from distlab.comm import RankError
from distlab.course.grading.cases import Cases, Noted
from distlab.course.grading.diagnosis.traffic import calls, in_megabytes, most_sent
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Fault, Mutant

Shapes = list[tuple[int, int]]
SLACK = 4 / 3  # to find the least possible takes long; the most work first, to the least busy, stays below this
BLOCK: Shapes = [(192, 64), (64, 64), (256, 64), (64, 256)]  # queries, keys and values; projection; feed-forward
LISTS: dict[str, tuple[Shapes, int]] = {
    "12 matrices of 64 x 64 on 4 ranks": ([(64, 64)] * 12, 4),
    "two blocks of a GPT on 4 ranks": (BLOCK * 2, 4),
    "a large matrix behind 8 small ones on 2 ranks": ([(32, 32)] * 8 + [(64, 64)], 2),
    "a large matrix before 7 small ones on 2 ranks": ([(64, 64)] + [(32, 32)] * 7, 2),
    "as many numbers, not as much work, on 2 ranks": ([(64, 64), (4, 1024)] * 2, 2),
    "a tall matrix and two square ones on 2 ranks": ([(1024, 8), (64, 64), (64, 64)], 2),
    "a long matrix behind six square ones on 2 ranks": ([(64, 64)] * 6 + [(8, 24576)], 2),
    "matrices with one row on 3 ranks": ([(1, 50), (64, 64), (1, 80), (60, 1), (64, 60)], 3),
    "four matrices on 3 ranks": ([(64, 128), (64, 320), (64, 128), (64, 128)], 3),
    "3 matrices on 5 ranks": ([(16, 8), (8, 8), (8, 16)], 5),
}


def work_of(shape: tuple[int, int]) -> int:
    """Return the work of a matrix, in units of two operations per iteration."""
    short, long = sorted(shape)
    return 2 * short**2 * long + short**3


def least_work(work: list[int], num_ranks: int) -> int:
    """Return the least work that the slowest rank can have, by trying all that may be better than what was found."""
    left, best = sorted(work, reverse=True), sum(work)

    def give(at: int, busy: list[int]) -> None:
        nonlocal best
        if at == len(left):
            best = max(busy, default=0)
            return
        for load in sorted(set(busy)):  # ranks that are equally busy are alike
            if load + left[at] < best:
                rest = list(busy)
                rest[rest.index(load)] += left[at]
                give(at + 1, rest)

    give(0, [0] * num_ranks)
    return best


def use_owners(fn: Callable[..., Any], shapes: Shapes, num_ranks: int) -> dict[str, Any]:
    """Say whether each matrix has an owner, and how busy the slowest rank is: many answers are right."""
    owners, work = fn(shapes, num_ranks), [*map(work_of, shapes)]
    each, slowest = f"a rank from 0 to {num_ranks - 1}, for each of {len(shapes)}", "the work of the slowest rank"
    is_list = isinstance(owners, list | tuple) and len(owners) == len(shapes)
    if not is_list or not all(type(owner) is int and 0 <= owner < num_ranks for owner in owners):
        return {"the owners": owners, slowest: None}
    busiest = max(
        sum(one for one, owner in zip(work, owners, strict=True) if owner == rank) for rank in range(num_ranks)
    )
    least = max(1, least_work(work, num_ranks))
    near = "at most 4/3 of the least possible"
    return {"the owners": each, slowest: near if busiest <= SLACK * least else f"{busiest / least:.2f} of it"}


drive_owners = Cases(LISTS, use_owners)


def budget_owners(evidence: Evidence) -> list[str]:
    """Say how many lists were dealt out."""
    return [f"{len(LISTS)} lists of matrices; the slowest rank is at most a third busier than it must be"]


PIECES, CASE = ((2, 6), (3, 4), (1, 12), (4, 3)), "each rank owns two matrices"  # as many numbers in each


def changed(matrix: Tensor) -> Tensor:
    """Return what depends on each element of a matrix together with all others, as an iteration of Newton-Schulz."""
    return 1.5 * matrix - 0.5 * matrix @ matrix.mT @ matrix / matrix.square().sum()


def use_by_owners(
    fn: Callable[..., Any], pieces: list[Tensor], owners: list[int], wholes: list[Tensor] | None = None
) -> dict[str, Any]:
    """Return the updates, what was computed on this rank, and when."""
    seen, times = list[str](), list[int]()

    def orthogonalize(matrix: Tensor) -> Tensor:
        times.append(time.monotonic_ns())
        alike = (f"matrix {at}" for at, whole in enumerate(wholes or ()) if torch.equal(matrix, whole))
        seen.append(next(alike, f"{list(matrix.shape)}"))
        return changed(matrix)

    begin_ns = time.monotonic_ns()
    updates = fn(pieces, owners, orthogonalize)
    return {
        "what is computed here": ", ".join(sorted(seen)) or "nothing",
        "the updates": updates,
        "times": Noted((begin_ns, times, time.monotonic_ns())),
    }


def _pieces_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    owners = [*range(n)][::-1] + [*range(n)]
    shapes = [PIECES[index % len(PIECES)] for index in range(2 * n)]
    wholes = [seeded(-1, n * rows, columns, purpose=f"{at}") for at, (rows, columns) in enumerate(shapes)]
    return {CASE: ([whole.chunk(n)[rank].clone() for whole in wholes], owners, wholes)}


drive_by_owners = Cases(_pieces_cases, use_by_owners, most_bytes=1.3, needs="each piece to its owner and back")


def judge_by_owners(evidence: Evidence) -> Iterator[Fault]:
    """All matrices are with their owners before the first of a rank is computed; none leaves before the last is."""
    for rank, result in enumerate(evidence.results):
        begin_ns, times, end_ns = result[CASE]["result"]["times"].value
        made = [call for call in calls(evidence, rank) if begin_ns <= call.start_ns <= end_ns]
        late = sum(call.start_ns > at for call in made for at in times[:1])
        early = sum(0 < call.wait_ns < at for call in made for at in times[-1:])
        if evidence.world_size > 1 and 2 * max(late, early) > len(made):
            text = (
                f"right result, but rank {rank} computes while matrices are still to be sent, or are sent back already"
            )
            advice = "owners wait for each other, so that one computes at a time: send all pieces to their owners first"
            yield Fault("one owner at a time", f"{text}: {advice}, then compute, then send all updates back")


def failure_by_owners(error: RankError, world_size: int) -> Fault | None:
    """Name a gather that the owner alone calls."""
    text = str(error)
    if ": gather" in text and any(words in text for words in ("do not make the same call", "returned without it")):
        words = "ranks gather different matrices, or none, at the same time: every rank sends its piece of each matrix"
        return Fault(
            "not on every rank", f"{words}, in the order of the list; `if rank == owner` is for the list alone"
        )
    return None


def budget_by_owners(evidence: Evidence) -> list[str]:
    """Say what was sent, and what each rank would send and compute if all ranks had all matrices."""
    n, size = evidence.world_size, 8 * PIECES[0][0] * PIECES[0][1]
    sent, everywhere = in_megabytes(most_sent(evidence)), in_megabytes(2 * n * (n - 1) * size)
    return [f"sent {sent} per rank, and 2 matrices computed; gathered everywhere {everywhere}, and {2 * n} matrices"]


_ORDER, _LEAST = "sorted(range(len(shapes)), key=lambda index: -work[index])", "busy.index(min(busy))"
_WORK = "2 * min(shape) ** 2 * max(shape) + min(shape) ** 3 for shape in shapes"
_AS_MANY = (
    "sorted by work, each rank gets as many matrices, in turn or the least work first, and a large one meets as many "
    "small ones as the others: give the most work first, to the rank with the least so far"
)
_LAST = "the least busy rank, but in the order of the list: a large matrix that comes last finds all ranks half full"
_IN_TURN = "each rank has as many matrices, whatever their work: give each to the rank with the least work so far"
_NUMBERS = "it counts elements; a square matrix takes more work than a long one with as many elements"
_ROWS = "m is taken for the number of rows; a tall matrix is transposed first, so m is the shorter side"
_CUBES = "the longer side does not count in its work: 2 m^2 k + m^3, and most of it is the first term"
_NEVER = "what a rank has been given is not added to its work, so that one rank is always the least busy"
_GIVEN_OUT = "owners are in the order in which matrices were given out; owners[i] is the owner of shapes[i]"
_LISTS = "it lists the matrices of each rank; owners[i] is the owner of matrix i, one number for each"
_OF_EACH = "[[i for i, owner in enumerate(owners) if owner == r] for r in range(num_ranks)]"

WRONG_OWNERS = (
    Mutant("in the order of the list", "in the order of the list", _LAST).edit(_ORDER, "range(len(shapes))"),
    Mutant("the least work first", "as many each, by work", _AS_MANY).edit("-work[index]", "work[index]"),
    Mutant("in turn", "as many matrices each", _IN_TURN)
    .edit(_ORDER, "range(len(shapes))")
    .edit(_LEAST, "index % num_ranks"),
    Mutant("back and forth", "as many each, by work", _AS_MANY)
    .edit(f"index in {_ORDER}", f"at, index in enumerate({_ORDER})")
    .edit(_LEAST, "min(at % (2 * num_ranks), 2 * num_ranks - 1 - at % (2 * num_ranks))"),
    Mutant("by numbers", "by numbers of elements", _NUMBERS).edit(_WORK, "shape[0] * shape[1] for shape in shapes"),
    Mutant("by rows", "rows for the shorter side", _ROWS).edit(
        _WORK, "shape[0] ** 2 * (2 * shape[1] + shape[0]) for shape in shapes"
    ),
    Mutant("cubes", "the longer side is missing", _CUBES).edit(_WORK, "min(shape) ** 3 for shape in shapes"),
    Mutant("never busy", "one rank owns all", _NEVER).without("busy[owners[index]] += work[index]"),
    Mutant("in the order of work", "owners in a different order", _GIVEN_OUT)
    .edit("[0] * len(shapes), ", "[], ")
    .edit("owners[index] =", "at =")
    .edit("busy[owners[index]] += work[index]", "busy[at] += work[index]\nowners.append(at)"),
    Mutant("from 1", "from one", "ranks are counted from 0").edit(
        "return owners", "return [owner + 1 for owner in owners]"
    ),
    Mutant("a list for each rank", "a list for each rank", _LISTS).edit("return owners", f"return {_OF_EACH}"),
    Mutant("sorts the list", "changed argument", "belongs to the caller").edit(
        "work = [", "shapes.sort(key=lambda shape: -shape[0] * shape[1])\nwork = ["
    ),
)

_GATHER, _TO_OWNER = "dist.gather(piece, rows, dst=owner)", "if rank == owner:\n    changed[index] = torch.cat(rows)"
_SCATTER, _CHUNKS = "dist.scatter(updates[index], rows, src=owner)", "list(changed[index].chunk(n))"
_EMPTY, _BACK = "[torch.empty_like(piece) for piece in pieces]", f"rows = {_CHUNKS} if rank == owner else None"
_ROWS_OF = "rows = [torch.empty_like(piece) for _ in range(n)]"
_EVERYWHERE = "every rank gathers and computes every matrix: n times the work; the owner alone computes a matrix"
_OWN = "each rank makes its own rows orthogonal, among themselves: that depends on the number of ranks"
_WHOLE = "all ranks get a whole matrix, and each drops what it does not need: gather to the owner, scatter rows back"
_RANK_0 = "rank 0 computes all matrices while the others wait: owners[i] says who computes matrix i"
_TURNS = "owners are dealt out in turn, and the list `owners` is not looked at"
_KEPT = "the owner keeps its update, and the others' rows stay what they were: scatter them"
_SUMMED = "the owner gets the sum of the pieces; they are different rows of one matrix: gather them"

WRONG_BY_OWNERS = (
    Mutant("everywhere", "computed everywhere", _EVERYWHERE, 2).body(f"""
        updates, n, rank = [], dist.get_world_size(), dist.get_rank()
        for piece in pieces:
            {_ROWS_OF}
            dist.all_gather(rows, piece)
            updates.append(orthogonalize(torch.cat(rows)).chunk(n)[rank])
        return updates
    """),
    Mutant("own rows", "own rows alone", _OWN, 2).body("return [orthogonalize(piece) for piece in pieces]"),
    Mutant("one owner at a time", "one owner at a time", "owners wait for each other", 2).body(f"""
        n, rank, updates = dist.get_world_size(), dist.get_rank(), {_EMPTY}
        for piece, owner, update in zip(pieces, owners, updates, strict=True):
            {_ROWS_OF} if rank == owner else None
            {_GATHER}
            rows = list(orthogonalize(torch.cat(rows)).chunk(n)) if rank == owner else None
            dist.scatter(update, rows, src=owner)
        return updates
    """),
    Mutant("computes on the way back", "one owner at a time", "owners wait for each other", 2)
    .without("changed = {index: orthogonalize(matrix) for index, matrix in changed.items()}")
    .edit(_CHUNKS, "list(orthogonalize(changed[index]).chunk(n))"),
    Mutant("broadcast", "whole updates sent back", _WHOLE, 3)
    .edit(_BACK, "whole = changed[index] if rank == owner else torch.cat([torch.empty_like(pieces[index])] * n)")
    .edit(_SCATTER, "dist.broadcast(whole, src=owner)\nupdates[index] = whole.chunk(n)[rank]"),
    Mutant("rank 0 owns all", "one rank computes all", _RANK_0, 2).edit(
        "n, rank =", "owners = [0] * len(owners)\nn, rank ="
    ),
    Mutant("index % n", "owners of its own", _TURNS, 2).edit(
        "n, rank =", "owners = [index % dist.get_world_size() for index in range(len(owners))]\nn, rank ="
    ),
    Mutant("not sent back", "not sent back", _KEPT, 2)
    .edit(_EMPTY, "[piece.clone() for piece in pieces]")
    .edit(_SCATTER, "if rank == owner:\n    updates[index] = rows[rank]"),
    Mutant("summed", "pieces summed", _SUMMED, 2)
    .edit(_GATHER, "whole = piece.clone()\ndist.reduce(whole, dst=owner)")
    .edit("torch.cat(rows)", "torch.cat([whole] * n)"),
    Mutant("into the pieces", "changed argument", "it belongs to the caller", 2).edit(_EMPTY, "pieces"),
    Mutant("owners alone gather", "not on every rank", "is for the list alone", 2, ends=True).edit(
        f"{_GATHER}\n{_TO_OWNER}", f"if rank == owner:\n    {_GATHER}\n    changed[index] = torch.cat(rows)"
    ),
)
