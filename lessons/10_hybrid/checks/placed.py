"""How one tensor lies on an axis: the cheapest way to a different placement, and the sum that a program lacks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import in_megabytes, most_sent
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant
from distlab.placements import Partial, Placement, Replicate, Shard, layout_of

R, P = Replicate(), Partial()
SHAPES = ((12, 24), (24, 12, 2))
CHANGES = [
    *itertools.product((Shard(0), Shard(1), P), (R, Shard(0), Shard(1))),
    *itertools.product((R,), (R, Shard(0), Shard(1))),
    (P, P),
]


def part_of(shape: tuple[int, ...], placement: Placement, rank: int, n: int) -> Tensor:
    """Return what a rank holds."""
    if placement == P:
        return seeded(rank, *shape, purpose=f"summand {shape}")
    whole = seeded(-1, *shape, purpose=f"whole {shape}")
    return whole.chunk(n, placement.dim)[rank].contiguous() if isinstance(placement, Shard) else whole


def use_redistribute(fn: Callable[..., Any], local: Tensor, before: Placement, after: Placement) -> Any:
    """Call on all ranks."""
    return fn(local, before, after, dist.group.WORLD)


drive_redistribute = Cases(
    lambda rank, n: {
        f"{before} -> {after} of {list(shape)}": (part_of(shape, before, rank, n), before, after)
        for before, after in CHANGES
        for shape in SHAPES
    },
    use_redistribute,
    needs="the cheapest way",
)


def budget_redistribute(evidence: Evidence) -> list[str]:
    """Say how many changes were made."""
    return [f"{len(CHANGES)} changes of {len(SHAPES)} tensors; {in_megabytes(most_sent(evidence))} sent per rank"]


LAYER, PRODUCT = "h matmul x w1, a relu h, y matmul a w2", "y matmul a w1"
CUT, ROWS = "x R, w1 S(1), w2 S(0)", "a S(1), w1 S(0)"
PROGRAMS = {
    "two matrices, relu between": (f"{LAYER}, z all_reduce y", CUT),
    "two matrices, and nobody adds": (LAYER, CUT),
    "relu of summands": ("h matmul x w, a relu h, y all_reduce a", "x S(1), w S(0)"),
    "x is added to summands": ("h matmul x w1, y matmul h w2, z add x y, s all_reduce z", CUT),
    "summands of two products are added": (
        f"{PRODUCT}, z matmul b w2, s add y z, t all_reduce s",
        f"{ROWS}, b S(1), w2 S(0)",
    ),
    "summands times a whole matrix": (
        f"{PRODUCT}, q matmul y w2, s matmul w3 q, t all_reduce s",
        f"{ROWS}, w2 R, w3 R",
    ),
    "summands times a matrix that is cut": (f"{PRODUCT}, q matmul y w2, b relu q", f"{ROWS}, w2 S(1)"),
    "summands times summands": (f"{PRODUCT}, z matmul b w1, s matmul y z, t all_reduce s", f"{ROWS}, b S(1)"),
    "one name for all": ("x matmul x w1, x relu x, x matmul x w2, x relu x", CUT),
    "each rank has its own samples": (f"{LAYER}, loss sum y", "x S(0), w1 R, w2 R"),
    "a loss of summands": (f"{PRODUCT}, loss sum y, whole all_reduce loss", ROWS),
    "an update with the gradient of own samples": ("g matmul x error, new add w g", "x S(1), error S(0), w R"),
    "all is whole": ("y matmul x w, loss sum y", "x R, w R"),
}


def read_program(lines: str, layouts: str) -> tuple[list[tuple[str, ...]], dict[str, Placement]]:
    """Return a program and the layouts of its inputs, written with commas between lines and between names."""
    at = dict(map(str.split, layouts.split(", ")))
    return [tuple(line.split()) for line in lines.split(", ")], {name: layout_of(word)[0] for name, word in at.items()}


def use_missing(fn: Callable[..., Any], program: list[tuple[str, ...]], layouts: dict[str, Placement]) -> Any:
    """Return what it found in words, and whether it left the layouts alone."""
    before = dict(layouts)
    found = fn(program, layouts)
    line, name = found if isinstance(found, list | tuple) and len(found) == 2 else (found, None)
    said = {"the line": "none" if found is None else line, "what to sum before it": name}
    return {**said, "the caller's layouts": "as they were" if layouts == before else "written over"}


drive_missing_sum = Cases({name: read_program(*both) for name, both in PROGRAMS.items()}, use_missing)


def budget_missing_sum(evidence: Evidence) -> list[str]:
    """Say how many programs were read."""
    return [f"{len(PROGRAMS)} programs read, none of them run"]


_PIECES = "pieces = [piece.contiguous() for piece in local.chunk(n, after.dim)]\n"
_SCATTER = "own = torch.empty_like(pieces[0])\ndist.reduce_scatter(own, pieces, group=group)\nreturn own"
_GATHER = "parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(n)]"
_ALL = f"{_GATHER}\ndist.all_gather(parts, local.contiguous(), group=group)\n"
_TO_ALL = (
    "leaving = torch.cat(pieces)\narrived = torch.empty_like(leaving)\n"
    "dist.all_to_all_single(arrived, leaving, group=group)\n"
)
_ARRIVED, _OWN = "return torch.cat(arrived.chunk(n), before.dim)", "local.chunk(n, after.dim)[rank]"
_SEND = "dist.scatter(own, pieces if rank == 0 else None, group=group, group_src=0)\nreturn own"
_SUM = "total = local.clone()\ndist.all_reduce(total, group=group)\nreturn total"

WRONG_REDISTRIBUTE = (
    Mutant(
        "all-reduce, then cut",
        "all-reduce, then cut",
        "P -> S(d) by an all-reduce sums what the rank then drops: a reduce-scatter sends half",
        2,
    ).edit(_SCATTER, f"total = local.clone()\ndist.all_reduce(total, group=group)\nreturn total{_OWN[5:]}"),
    Mutant(
        "all-gather, then cut",
        "all-gather, then cut",
        "S(d) -> S(e) by an all-gather sends each part to all ranks: by an all-to-all each gets only what it keeps",
        2,
    ).edit(f"{_TO_ALL}{_ARRIVED}", f"{_ALL}return torch.cat(parts, before.dim).chunk(n, after.dim)[rank]"),
    Mutant(
        "zeros, then all-reduce",
        "parts summed",
        "S(d) -> R by an all-reduce of parts among zeros: parts need no sum, and an all-gather sends half",
        2,
    ).edit(
        f"{_ALL}return torch.cat(parts, before.dim)",
        "parts = [torch.zeros_like(local) for _ in range(n)]\nparts[rank] = local\n"
        "total = torch.cat(parts, before.dim)\ndist.all_reduce(total, group=group)\nreturn total",
    ),
    Mutant(
        "all summands gathered",
        "summands gathered",
        "P -> R by an all-gather of summands, which are added afterwards: that sends n/2 times what an all-reduce does",
        3,
    ).edit(_SUM, f"{_ALL}return torch.stack(parts).sum(0)"),
    Mutant(
        "copies summed",
        "copies summed",
        "R -> S(d) sums: copies are no summands, and the part is here already",
        2,
    ).edit(f"return {_OWN}", f"{_PIECES}{_SCATTER}"),
    Mutant(
        "sent to each",
        "sent to each",
        "R -> S(d) by a scatter, or by a broadcast: nothing needs to be sent, each rank cuts its part of what it has",
        2,
    ).edit(f"return {_OWN}", f"{_PIECES}own = pieces[rank].clone()\n{_SEND}"),
    Mutant(
        "a mean", "summands averaged", "a Partial is the sum over the ranks, not the mean: do not divide", 2, 9
    ).edit("return total", "return total / n"),
    Mutant(
        "own summand", "not summed", "P -> S(d): its part of its own summand; the other ranks' summands are missing", 2
    ).edit(_SCATTER, "return pieces[rank]"),
    Mutant(
        "own summand for all", "not summed", "P -> R: it is this rank's own summand: all_reduce a copy of it", 2
    ).without("dist.all_reduce(total, group=group)"),
    Mutant(
        "gathered on dim 0",
        "gathered along dim 0",
        "S(d) -> R: parts are put end to end along dim 0; they are parts of dim d: torch.cat(parts, before.dim)",
        2,
    ).edit("torch.cat(parts, before.dim)", "torch.cat(parts)"),
    Mutant(
        "put together on the new dim",
        "put together on the wrong dim",
        "S(d) -> S(e): what arrives is put end to end along e; it is cut along e, and was along d: torch.cat along d",
        2,
    ).edit(_ARRIVED, "return torch.cat(arrived.chunk(n), after.dim)"),
    Mutant(
        "cut on the old dim",
        "cut on the wrong dim",
        "S(d) -> S(e): what leaves is cut along d; each rank keeps a part of e: cut along e, put together along d",
        2,
    ).edit(
        "for piece in local.chunk(n, after.dim)",
        "for piece in local.chunk(n, (after if before == Partial() else before).dim)",
    ),
    Mutant("in place", "changed argument", "it belongs to the caller", 2, 8).edit("local.clone()", "local"),
)

_FIND = "if summand in placed and asked not in passes:\n    return line, names[placed.index(summand)]"

WRONG_MISSING_SUM = (
    Mutant(
        "relu passes",
        "relu of summands",
        "relu of summands, summed, is not relu of the sum: what is not linear needs the whole",
    ).edit("and asked not in passes", 'and asked not in passes and operation != "relu"'),
    Mutant(
        "adds whole to summands",
        "whole added to summands",
        "what is whole on every rank, added to summands, counts once for each rank in their sum",
    ).edit("and asked not in passes", 'and asked not in passes and operation != "add"'),
    Mutant(
        "product of summands",
        "product of summands",
        "the product of two summands on each rank lacks those of different ranks: (a + b)(c + d) is not ac + bd",
    ).edit("and asked not in passes", "and asked not in passes and set(placed) != {summand}"),
    Mutant(
        "any product passes",
        "product with a part",
        "summands times a part, and the part is of other columns on each rank: summing mixes different columns",
    ).edit("and asked not in passes", 'and asked not in passes and operation != "matmul"'),
    Mutant(
        "no summand passes",
        "asks too early",
        "a product with a whole matrix, a sum, and a sum of two Partials are linear: add up later, and once",
    ).edit("asked not in passes", 'operation != "all_reduce"'),
    Mutant(
        "where it begins",
        "where it begins",
        "it names the line that makes a Partial; the first that takes it for the whole is asked",
    ).edit(_FIND, "if asked in begins:\n    return line, names[0]"),
    Mutant(
        "a part of a sum",
        "sum of parts",
        "the sum of all elements of a part is a summand of the whole sum: Partial",
    ).edit(', ("sum", Shard(0)), ("sum", Shard(1))', ""),
    Mutant(
        "products are whole",
        "Partial not seen",
        "columns cut on the left and rows on the right: each rank multiplies its own, and has a summand: Partial",
    ).edit('("matmul", Shard(1), Shard(0)), ', ""),
    Mutant(
        "all_reduce forgotten",
        "all_reduce not seen",
        "after an all_reduce the name is whole on every rank",
    ).edit('("all_reduce", summand): whole', '("all_reduce", summand): summand'),
    Mutant(
        "end not looked at",
        "Partial at the end",
        "the last line's result is a Partial, and nobody adds: then the line is len(program)",
    ).edit("(len(program), result) if at[result] == summand else None", "None"),
    Mutant(
        "inputs alone",
        "results not followed",
        "it looks up how the inputs lie; what a line makes is an input of later ones, also under an old name",
    ).edit("[at[name] for", "[layouts.get(name, at.get(name)) for"),
    Mutant("first operand", "wrong name", "it names the first operand; name the one that is a Partial").edit(
        "names[placed.index(summand)]", "names[0]"
    ),
    Mutant("from one", "counted from one", "lines count from 0").edit("enumerate(program)", "enumerate(program, 1)"),
    Mutant(
        "layouts written over",
        "layouts written over",
        "`layouts` belongs to the caller: work on a copy, dict(layouts)",
        seen=8,
    ).edit("dict(layouts)", "layouts"),
)
