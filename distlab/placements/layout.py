"""Placements: what each rank of a mesh holds of one tensor, as values.

On each axis of the mesh a tensor has one placement: its parts (`Shard`), copies (`Replicate`) or summands (`Partial`).
A layout is one placement for each axis, slowest axis first, as DTensor's. (S(0), R) on a mesh of 2 x 3 ranks: halves of
the rows, each of which three ranks have. Where two axes cut one dim, (S(0), S(0)), the first one cuts the whole and the
second one cuts each part: so the last axis of them must be gathered first.

Parts are those of torch.chunk: all of one length, but for the last ones, which may be short or empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Each rank of the axis has a part: its own range of one dim.

    Attributes:
        dim: which one is cut, from 0.
    """

    dim: int

    def __str__(self) -> str:
        """Return the short word, S(0)."""
        return f"S({self.dim})"


@dataclass(frozen=True)
class Replicate:
    """Each rank of the axis has the same values."""

    def __str__(self) -> str:
        """Return the short word, R."""
        return "R"


@dataclass(frozen=True)
class Partial:
    """Each rank of the axis has a summand: the tensor is the sum over the ranks, which nobody has."""

    def __str__(self) -> str:
        """Return the short word, P."""
        return "P"


Placement = Shard | Replicate | Partial
Layout = tuple[Placement, ...]


def shard_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Return the lengths of the parts of a dim, by torch.chunk's rule: 5 in 4 parts is 2, 2, 1, 0."""
    longest = math.ceil(length / parts)
    return tuple(max(0, min(longest, length - part * longest)) for part in range(parts))


def words(layout: Sequence[Placement]) -> str:
    """Return a layout in short words: "S(0), R"."""
    return ", ".join(map(str, layout))


def layout_of(text: str) -> Layout:
    """Return the layout that short words name: "S(0), R".

    Raises:
        ValueError: a word that is none of S(0), S(1), ..., R and P.
    """
    found: list[Placement] = []
    for word in text.split(","):
        cut = re.fullmatch(r"S\((\d+)\)", word.strip())
        if not cut and word.strip() not in ("R", "P"):
            raise ValueError(f"{word.strip()!r} is no placement; write S(0), S(1), ..., R or P, one for each mesh axis")
        found.append(Shard(int(cut[1])) if cut else Replicate() if word.strip() == "R" else Partial())
    return tuple(found)


def check_layout(shape: Sequence[int], layout: Sequence[Placement], mesh: Sequence[int]) -> Layout:
    """Return the layout as a tuple, if a tensor of this shape can have it on this mesh.

    Raises:
        ValueError: as many placements as axes are wanted, dims that the tensor has, and axes of one rank or more.
    """
    if len(layout) != len(mesh) or not mesh or min(mesh) < 1:
        raise ValueError(
            f"the layout ({words(layout)}) has {len(layout)} placements and the mesh {tuple(mesh)} {len(mesh)} axes; "
            "give one placement for each axis, and each axis at least one rank"
        )
    for placement in layout:
        if not isinstance(placement, Placement):
            raise ValueError(f"{placement!r} is no placement; pass Shard(dim), Replicate() or Partial()")
        if isinstance(placement, Shard) and not 0 <= placement.dim < len(shape):
            raise ValueError(
                f"{placement} of a tensor of {len(shape)} dims, {tuple(shape)}; pass a dim in 0..{len(shape) - 1}"
                if shape
                else f"{placement} of a tensor without dims; pass Replicate() or Partial()"
            )
    return tuple(layout)


def coordinates(mesh: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return a rank's place on each axis of the mesh; the last axis varies fastest.

    Raises:
        ValueError: the mesh has no such rank.
    """
    if not 0 <= rank < math.prod(mesh):
        raise ValueError(f"rank {rank} is outside the mesh {tuple(mesh)}; pass a rank in 0..{math.prod(mesh) - 1}")
    return tuple(rank // math.prod(mesh[axis + 1 :]) % mesh[axis] for axis in range(len(mesh)))


def local_ranges(shape: Sequence[int], layout: Sequence[Placement], mesh: Sequence[int], rank: int) -> list[range]:
    """Return which indices of each dim a rank holds.

    Raises:
        ValueError: the tensor cannot have the layout on the mesh.
    """
    ranges = [range(length) for length in shape]
    for placement, size, place in zip(check_layout(shape, layout, mesh), mesh, coordinates(mesh, rank), strict=True):
        if isinstance(placement, Shard):
            before = ranges[placement.dim]
            sizes = shard_sizes(len(before), size)
            start = before.start + sum(sizes[:place])
            ranges[placement.dim] = range(start, start + sizes[place])
    return ranges


def local_shape(shape: Sequence[int], layout: Sequence[Placement], mesh: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the shape of what a rank holds of a tensor of this shape, on a mesh of so many ranks on each axis.

    Raises:
        ValueError: the tensor cannot have the layout on the mesh.
    """
    return tuple(map(len, local_ranges(shape, layout, mesh, rank)))


def cut(whole: Tensor, layout: Sequence[Placement], mesh: Sequence[int], rank: int) -> Tensor:
    """Return what a rank holds of a tensor that all have; sends nothing.

    Of a sum the first rank of the axis has all, and the others zeros.

    Shapes: whole, any -> local_shape(...), in memory of its own

    Raises:
        ValueError: the tensor cannot have the layout on the mesh.
    """
    part = whole[tuple(slice(one.start, one.stop) for one in local_ranges(whole.shape, layout, mesh, rank))].clone()
    places = zip(layout, coordinates(mesh, rank), strict=True)
    return part.zero_() if any(isinstance(one, Partial) and place for one, place in places) else part
