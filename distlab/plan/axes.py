"""Axes: the five kinds of parallelism as axes of one mesh of ranks.

    mesh_of(Plan(data=2, pipeline=2, tensor=2))  -> pipeline (2) x data (2) x expert (1) x context (1) x tensor (2) = 8

Each rank has a place on all five. Along an axis the ranks that differ in that place alone form a group: those of one
layer's parts (tensor), one sequence's (context), one set of experts' (expert), one model's stages (pipeline), or equal
replicas (data). The last axis varies fastest, so its groups are neighbours and share a node where they fit: by default
tensor, which communicates most often and cannot wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from distlab.plan.mesh import Mesh
from distlab.plan.records import Plan

AXES = ("pipeline", "data", "expert", "context", "tensor")


def mesh_of(plan: Plan, *, order: Sequence[str] = AXES, world_size: int | None = None) -> Mesh:
    """Lay the ranks of a plan out on all five axes, those of size 1 too.

    Args:
        plan: its degrees are the sizes of the axes.
        order: the axes from the slowest to the fastest.
        world_size: ranks that the mesh must fill, where that is given.

    Raises:
        ValueError: the order does not name each axis once, or the product of the degrees is not world_size.
    """
    check_order(order)
    return Mesh([(axis, getattr(plan, axis)) for axis in order], world_size=world_size)


def check_order(order: Sequence[str]) -> tuple[str, ...]:
    """Check that the order names each axis exactly once; return it as a tuple.

    Raises:
        ValueError: an axis is missing, unknown or named twice.
    """
    if isinstance(order, str) or sorted(order) != sorted(AXES):
        given = order if isinstance(order, str) else ", ".join(map(str, order))
        raise ValueError(f"the order of axes is {given!r}; name each of {', '.join(AXES)} once, slowest first")
    return tuple(order)
