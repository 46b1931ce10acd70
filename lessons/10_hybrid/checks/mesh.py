"""Places on a mesh, and the groups of an axis: meshes of every shape that a few ranks have, on paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import describe
from distlab.plan import Mesh

MESHES = (  # the first names faults best
    {"pipeline": 2, "data": 2, "tensor": 2},
    {"pipeline": 4, "data": 3, "tensor": 2},
    {"data": 2, "pipeline": 1, "context": 3},
    {"tensor": 4},
)


def drive_places(fn: Callable[[int, dict[str, int]], Any]) -> list[list[Any]]:
    """Ask for the place of every rank of each mesh."""
    return [[fn(rank, dict(axes)) for rank in range(Mesh(axes).size)] for axes in MESHES]


def drive_groups(fn: Callable[[str, dict[str, int]], Any]) -> list[dict[str, Any]]:
    """Ask for the groups of every axis of each mesh."""
    return [{axis: fn(axis, dict(axes)) for axis in axes} for axes in MESHES]


def judge_places(evidence: Evidence) -> Iterator[Fault]:
    """The last axis varies fastest, and every place is inside its axis."""
    for axes, places in zip(MESHES, evidence.results[0], strict=True):
        mesh, turned = Mesh(axes), Mesh(dict(reversed(axes.items())))
        for rank, got in enumerate(places):
            what = f"rank {rank} of {mesh}"
            if not isinstance(got, dict) or not all(isinstance(value, Integral) for value in got.values()):
                yield Fault("returned", f"{what}: expected a dict of axes and places, got {describe(got)}")
            if set(got) != set(axes):
                yield Fault("axes", f"{what}: got places on {', '.join(map(str, got))}; expected one on each axis")
        if places[1] != mesh.coordinates(1) and places == [turned.coordinates(rank) for rank in range(mesh.size)]:
            text = f"on {mesh} rank 1 differs from rank 0 on {mesh.names[0]}, expected on {mesh.names[-1]}"
            yield Fault("first axis fastest", f"{text}: the last axis varies fastest, like the last digit of a number")
        for rank, got in enumerate(places):
            if got != mesh.coordinates(rank):
                yield _place_fault(rank, got, axes)
        for got in places:
            if list(got) != list(axes):
                text = f"on {mesh} the places are right, in the order {', '.join(got)}"
                yield Fault("turned round", f"{text}; return them in the order of the axes: {', '.join(axes)}")


def _place_fault(rank: int, got: dict[str, int], axes: dict[str, int]) -> Fault:
    want = Mesh(axes).coordinates(rank)
    axis = next(name for name in axes if got[name] != want[name])
    size, text = axes[axis], f"rank {rank} of {Mesh(axes)}: its place on {axis} is {got[axis]}, expected {want[axis]}"
    if got == {name: place + 1 for name, place in want.items()}:
        return Fault("from one", f"{text}: places are counted from 0")
    if not 0 <= got[axis] < size:
        text += f". It must lie in 0..{size - 1}: divide by the sizes of the faster axes, then take the rest"
        return Fault("outside", f"{text} by the axis' own size")
    if got[axis] == rank % size:
        text += f". That is rank % {size}: divide by the product of the faster axes' sizes first"
        return Fault("not divided", text)
    if got[axis] == rank // size % size:
        text += f". That divides by {size}, the axis' own size; divide by the product of the faster axes' sizes"
        return Fault("own size", text)
    return Fault("values", text)


def budget_places(evidence: Evidence) -> list[str]:
    """Say how many meshes were asked."""
    return [f"{len(MESHES)} meshes, {sum(Mesh(axes).size for axes in MESHES)} ranks"]


def judge_groups(evidence: Evidence) -> Iterator[Fault]:
    """Each rank once; members differ on the axis alone."""
    for axes, groups in zip(MESHES, evidence.results[0], strict=True):
        for axis in axes:
            yield from judge_axis(Mesh(axes), axis, groups[axis])


def judge_axis(mesh: Mesh, axis: str, got: Any) -> Iterator[Fault]:
    """Judge the groups of one axis."""
    what, size = f"the groups of {axis} on {mesh}", mesh.axis_size(axis)
    nested = isinstance(got, list | tuple) and all(isinstance(group, list | tuple) for group in got)
    if not nested or not all(isinstance(rank, Integral) for group in got for rank in group):
        yield Fault("returned", f"{what}: expected a list of lists of ranks, got {describe(got)}")
    held, want = [tuple(group) for group in got], mesh.groups(axis)
    if held == want:
        return
    members = [rank for group in held for rank in group]
    missing = [rank for rank in range(mesh.size) if rank not in members]
    if missing and len(held) == 1:
        text = f"{what}: got one group, {list(held[0])}. Every rank makes every group, also those it is not in: a rank"
        yield Fault("one group", f"{text} that makes fewer waits forever. List all of them")
    if missing:
        yield Fault("rank missing", f"{what}: rank {missing[0]} is in none of {held}")
    for rank in sorted(members):
        if members.count(rank) > 1 or not 0 <= rank < mesh.size:
            where = (
                f"is in {members.count(rank)} groups" if rank < mesh.size else f"does not exist on {mesh.size} ranks"
            )
            yield Fault("rank twice", f"{what}: rank {rank} {where}; every rank is in exactly one")
    for group in held:
        if len(group) != size and len({mesh.coordinates(rank)[axis] for rank in group}) == 1 < size:
            text = f"{what}: {list(group)} all stand at the same place on {axis}"
            yield Fault("same place", f"{text}; a group differs on {axis} and agrees on all other axes")
        if len(group) != size:
            text = f"{what}: {list(group)} has {len(group)} ranks, expected {size}, the size of the axis"
            yield Fault("wrong size", text)
    for group in held:
        yield from _judge_members(what, axis, group, mesh)
    yield Fault("order", f"{what}: right groups in another order: {held}, expected {want}")


def _judge_members(what: str, axis: str, group: tuple[int, ...], mesh: Mesh) -> Iterator[Fault]:
    for other in mesh.names:
        apart = sorted({mesh.coordinates(rank)[other] for rank in group})
        if other == axis or len(apart) == 1:
            continue
        text = f"{what}: {list(group)} mixes places {', '.join(map(str, apart))} on {other}"
        if group == tuple(range(group[0], group[0] + len(group))):
            text += f". Neighbouring numbers differ on the fastest axis, {mesh.names[-1]}; take ranks that are"
            yield Fault("neighbours", f"{text} as far apart as the product of the faster axes' sizes")
        yield Fault("mixed", f"{text}; members differ on {axis} alone")


def budget_groups(evidence: Evidence) -> list[str]:
    """Say how many groups were asked."""
    count = sum(len(Mesh(axes).groups(axis)) for axes in MESHES for axis in axes)
    return [f"{count} groups on {len(MESHES)} meshes; each is made by all ranks"]


_STEP = "rank, place[axis] = divmod(rank, axes[axis])"
_STRIDE = "prod(axes[name] for name in names[names.index(axis) + 1 :])"

WRONG_PLACES = (
    Mutant("first fastest", "first axis fastest", "the last axis varies fastest", 1).edit("reversed(axes)", "axes"),
    Mutant("no division", "not divided", "That is rank % 2", 1).edit(_STEP, "place[axis] = rank % axes[axis]"),
    Mutant("own size", "own size", "the axis' own size", 1).edit(
        _STEP, "size = axes[axis]\nplace[axis] = rank // (1 if axis == list(axes)[-1] else size) % size"
    ),
    Mutant("no rest", "outside", "It must lie in 0..1", 1).edit(_STEP, "rank, place[axis] = rank // axes[axis], rank"),
    Mutant("from 1", "from one", "counted from 0", 1).edit("place[axis] for", "place[axis] + 1 for"),
    Mutant("turned round", "turned round", "in the order of the axes", 1).edit(
        "{axis: place[axis] for axis in axes}", "place"
    ),
    Mutant("without ones", "axes", "expected one on each axis", 1).edit(
        "for axis in axes}", "for axis in axes if axes[axis] > 1}"
    ),
    Mutant("a tuple", "returned", "a dict of axes and places", 1).edit(
        "{axis: place[axis] for axis in axes}", "tuple(place[axis] for axis in axes)"
    ),
)
WRONG_GROUPS = (
    Mutant("neighbours", "neighbours", "[0, 1] mixes places 0, 1 on tensor", 1, 7).edit(_STRIDE, "1"),
    Mutant("far apart", "mixed", "[0, 4] mixes places 0, 1 on pipeline", 1).edit(
        _STRIDE, "prod(axes.values()) // axes[axis]"
    ),
    Mutant("one place", "same place", "all stand at the same place on pipeline", 1).edit(
        "[[first + place * stride for place in range(size)] for first in firsts]",
        "[[rank for rank in range(world_size) if rank // stride % size == place] for place in range(size)]",
    ),
    Mutant("rank 0's", "one group", "waits forever", 1, 6).edit("in firsts]", "in firsts[:1]]"),
    Mutant("first block", "rank missing", "rank 4 is in none", 1, 6).edit("in firsts]", "in range(stride)]"),
    Mutant("everyone begins", "rank twice", "rank 4 is in 2 groups", 1).without(" if rank // stride % size == 0"),
    Mutant("last first", "order", "right groups in another order", 1).edit("in firsts]", "in reversed(firsts)]"),
    Mutant("one too short", "rank missing", "rank 4 is in none", 1).edit("range(size)]", "range(size - 1)]"),
)
