"""Mesh: ranks laid out on named axes, one axis a kind of parallelism; `mesh_of` lays out a plan on all five.

    mesh_of(Plan(data=2, pipeline=2, tensor=2))  -> pipeline (2) x data (2) x expert (1) x context (1) x tensor (2) = 8

Each rank has a place on all five. Along an axis the ranks that differ in that place alone form a group: those of one
layer's parts (tensor), one sequence's (context), one set of experts' (expert), one model's stages (pipeline), or equal
replicas (data). The last axis varies fastest, so its groups are neighbours and share a node where they fit: by default
tensor, which communicates most often and cannot wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distlab.plan.records import Plan
from distlab.plan.require import require

AXES = ("pipeline", "data", "expert", "context", "tensor")


@dataclass(frozen=True, init=False)
class Mesh:
    """A grid of ranks; the last axis varies fastest, so that its groups hold neighbouring ranks.

        mesh = Mesh({"pipeline": 2, "data": 2, "tensor": 2})
        mesh.coordinates(5)       -> {"pipeline": 1, "data": 0, "tensor": 1}
        mesh.group_of(5, "data")  -> (5, 7)

    Put the axis that communicates most last: ranks of one node are numbered one after the other.

    Attributes:
        axes: pairs of name and size, in order.
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, axes: Mapping[str, int] | Iterable[tuple[str, int]], *, world_size: int | None = None) -> None:
        """Lay out the axes, and check that they fill `world_size` where that is given.

        Raises:
            ValueError: a name twice, a size below one, or a product other than world_size.
        """
        pairs = tuple((str(name), size) for name, size in (axes.items() if isinstance(axes, Mapping) else axes))
        require(bool(pairs), "a mesh needs at least one axis, such as {'data': 4}")
        names = [name for name, _ in pairs]
        for name, size in pairs:
            if names.count(name) > 1:
                raise ValueError(f"the mesh {_equation(pairs)} has two axes named {name!r}; give each its own name")
            whole = isinstance(size, int | np.integer) and not isinstance(size, bool) and bool(size >= 1)
            require(whole, f"the mesh {_equation(pairs)} has {name} = {size!r}; pass a whole number of at least 1")
        object.__setattr__(self, "axes", tuple((name, int(size)) for name, size in pairs))
        text = f"the mesh {self} does not fill {world_size} ranks; change an axis, or run {self.size} ranks"
        require(world_size in (None, self.size), text)

    @property
    def size(self) -> int:
        """Number of ranks: the product of the axes."""
        return math.prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, in order."""
        return tuple(name for name, _ in self.axes)

    def axis_size(self, axis: str) -> int:
        """Look up the size of an axis."""
        return self.axes[self._place(axis)][1]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Look up where a rank stands on each axis.

        Raises:
            ValueError: no rank has this number.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside the mesh {self}; pass a rank in 0..{self.size - 1}")
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return dict(reversed(found.items()))

    def rank(self, **coordinates: int) -> int:
        """Look up the rank at a place; every axis must be named.

        Raises:
            ValueError: an axis is missing or unknown, or a coordinate lies outside its axis.
        """
        text = f"got coordinates on {', '.join(coordinates) or 'no axis'}; the mesh {self} needs one on each of "
        require(set(coordinates) == set(self.names), f"{text}{', '.join(self.names)}")
        rank = 0
        for name, size in self.axes:
            place = coordinates[name]
            if not 0 <= place < size:
                raise ValueError(f"{name}={place} is outside the mesh {self}; pass a number in 0..{size - 1}")
            rank = rank * size + place
        return rank

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """List every group along an axis: ranks that differ in their place on that axis alone."""
        grid = np.moveaxis(self._grid(), self._place(axis), -1)
        return [tuple(group) for group in grid.reshape(-1, grid.shape[-1]).tolist()]

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """List the group of a rank along an axis, the rank itself included.

        Raises:
            ValueError: the mesh has no such rank or axis.
        """
        place = self._place(axis)
        stride = math.prod(size for _, size in self.axes[place + 1 :])
        first = rank - self.coordinates(rank)[axis] * stride
        return tuple(range(first, first + stride * self.axes[place][1], stride))

    def crosses_nodes(self, axis: str, devices_per_node: int) -> bool:
        """Tell whether some group of the axis has ranks in two nodes, where ranks fill the nodes in their order.

        Raises:
            ValueError: no axis has this name, or less than one device in a node.
        """
        require(devices_per_node >= 1, f"devices_per_node is {devices_per_node}; pass at least 1")
        nodes = np.moveaxis(self._grid() // devices_per_node, self._place(axis), 0)
        return bool((nodes[0] != nodes[-1]).any())

    def __str__(self) -> str:
        return f"{_equation(self.axes)} = {self.size}"

    def _place(self, axis: str) -> int:
        if axis not in self.names:
            raise ValueError(f"the mesh {self} has no axis {axis!r}; its axes are {', '.join(self.names)}")
        return self.names.index(axis)

    def _grid(self) -> NDArray[np.int64]:
        return np.arange(self.size).reshape([size for _, size in self.axes])


def _equation(axes: Iterable[tuple[str, object]]) -> str:
    return " x ".join(f"{name} ({size})" for name, size in axes)


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
    return Mesh(zip(order, sizes_of(plan, order), strict=True), world_size=world_size)


def sizes_of(plan: Plan, order: Sequence[str] = AXES, *, of_experts: bool = False) -> tuple[int, ...]:
    """Return the sizes of the axes; or of the mesh on which the groups of experts are rows, where these are folded."""
    own = {"data": plan.expert_copies, "context": 1, "tensor": 1} if of_experts else {"expert": 1}
    return tuple(own[axis] if plan.fold_experts and axis in own else getattr(plan, axis) for axis in order)


def check_order(order: Sequence[str]) -> tuple[str, ...]:
    """Check that the order names each axis exactly once; return it as a tuple.

    Raises:
        ValueError: an axis is missing, unknown or named twice.
    """
    if isinstance(order, str) or sorted(order) != sorted(AXES):
        given = order if isinstance(order, str) else ", ".join(map(str, order))
        raise ValueError(f"the order of axes is {given!r}; name each of {', '.join(AXES)} once, slowest first")
    return tuple(order)
