"""Places on a mesh, and the groups of an axis: meshes of every shape that a few ranks have, on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlab.course.grading.cases import Cases
from distlab.grading import Evidence, Mutant
from distlab.plan import Mesh

MESHES = [  # the first names faults best
    Mesh({"pipeline": 2, "data": 2, "tensor": 2}),
    Mesh({"pipeline": 4, "data": 3, "tensor": 2}),
    Mesh({"data": 2, "pipeline": 1, "context": 3}),
    Mesh({"tensor": 4}),
]


def use_place(fn: Callable[..., Any], rank: int, axes: dict[str, int]) -> dict[str, Any]:
    """Return the places, and the order in which they are given."""
    got = fn(rank, axes)
    return {"its places": got, "the order of its places": list(got) if isinstance(got, dict) else None}


def use_groups(fn: Callable[..., Any], axis: str, axes: dict[str, int]) -> Any:
    """Return each group as a text, so that it is told whole."""
    got = fn(axis, axes)
    is_nested = isinstance(got, list | tuple) and all(isinstance(group, list | tuple) for group in got)
    return {"the groups": [f"[{', '.join(map(str, group))}]" for group in got] if is_nested else got}


drive_coordinates = Cases(
    {f"rank {rank} of {mesh}": (rank, dict(mesh.axes)) for mesh in MESHES for rank in range(mesh.size)}, use_place
)
drive_groups = Cases(
    {f"{axis} on {mesh}": (axis, dict(mesh.axes)) for mesh in MESHES for axis in mesh.names}, use_groups
)


def budget_coordinates(evidence: Evidence) -> list[str]:
    """Say how many meshes were asked."""
    return [f"{len(MESHES)} meshes, {sum(mesh.size for mesh in MESHES)} ranks"]


def budget_groups(evidence: Evidence) -> list[str]:
    """Say how many groups were asked."""
    count = sum(len(mesh.groups(axis)) for mesh in MESHES for axis in mesh.names)
    return [f"{count} groups on {len(MESHES)} meshes; each is made by all ranks"]


_STEP = "rank, place[axis] = divmod(rank, axes[axis])"
_STRIDE = "prod(axes[name] for name in names[names.index(axis) + 1 :])"
_STRIDES = "a group's ranks are apart by the product of the faster axes' sizes"

WRONG_COORDINATES = (
    Mutant(
        "first fastest", "first axis fastest", "the last axis varies fastest, like the last digit of a number", 1
    ).edit("reversed(axes)", "axes"),
    Mutant(
        "no division",
        "not divided",
        "it takes the rest at once; first divide by the product of the faster axes' sizes",
        1,
    ).edit(_STEP, "place[axis] = rank % axes[axis]"),
    Mutant("own size", "own size", "it divides by the axis' own size, not by those of the faster axes", 1).edit(
        _STEP, "size = axes[axis]\nplace[axis] = rank // (1 if axis == list(axes)[-1] else size) % size"
    ),
    Mutant("no rest", "outside", "a place lies outside its axis: divide, and take the rest by the axis' size", 1).edit(
        _STEP, "rank, place[axis] = rank // axes[axis], rank"
    ),
    Mutant("from 1", "from one", "places are counted from 0", 1).edit("place[axis] for", "place[axis] + 1 for"),
    Mutant("turned round", "turned round", "the places are right; return them in the order of the axes", 1).edit(
        "{axis: place[axis] for axis in axes}", "place"
    ),
    Mutant("without ones", "axes", "an axis of size 1 is left out; its place is 0", 1).edit(
        "for axis in axes}", "for axis in axes if axes[axis] > 1}"
    ),
    Mutant("a tuple", "returned", "its places: expected the names", 1).edit(
        "{axis: place[axis] for axis in axes}", "tuple(place[axis] for axis in axes)"
    ),
)
WRONG_GROUPS = (
    Mutant("neighbours", "neighbours", f"it takes ranks of neighbouring numbers: {_STRIDES}", 1, 7).edit(_STRIDE, "1"),
    Mutant("far apart", "mixed", f"it takes ranks that are too far apart: {_STRIDES}", 1).edit(
        _STRIDE, "prod(axes.values()) // axes[axis]"
    ),
    Mutant("slower axes", "slower axes", f"it multiplies the sizes of the slower axes: {_STRIDES}", 1).edit(
        "[names.index(axis) + 1 :]", "[: names.index(axis)]"
    ),
    Mutant(
        "one place",
        "same place",
        "it groups the ranks of one place on the axis; a group differs there, and only there",
        1,
    ).edit(
        "[[first + place * stride for place in range(size)] for first in firsts]",
        "[[rank for rank in range(world_size) if rank // stride % size == place] for place in range(size)]",
    ),
    Mutant(
        "rank 0's", "one group", "list all groups: every rank makes every group, or the others wait forever", 1, 6
    ).edit("in firsts]", "in firsts[:1]]"),
    Mutant(
        "first block", "rank missing", "some ranks are in no group: a group begins at each rank of place 0", 1, 6
    ).edit("in firsts]", "in range(stride)]"),
    Mutant(
        "everyone begins", "rank twice", "some ranks are in two groups: a group begins only at a rank of place 0", 1
    ).without(" if rank // stride % size == 0"),
    Mutant("last first", "another order", "the groups are right; they stand in the order of their first ranks", 1).edit(
        "in firsts]", "in reversed(firsts)]"
    ),
    Mutant("one too short", "one too short", "a group has one rank too few: as many as the axis' size", 1).edit(
        "range(size)]", "range(size - 1)]"
    ),
    Mutant("in a row", "in a row", "groups begin where the place on the axis is 0, not at the lowest ranks", 1).edit(
        "[rank for rank in range(world_size) if rank // stride % size == 0]", "list(range(world_size // size))"
    ),
)
