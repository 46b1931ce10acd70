"""The format of saved shards: named parts of tensors, from which ranks with any other shards put their own together.

A shard means nothing without the number of shards it was cut into, and the next run may have a different number. So
each rank saves *named parts of tensors*: "of `blocks.0.norm.weight`, elements 12 to 24". A rank of a different job may
have shards of other bounds or units of other sizes. It asks for the elements it needs by name and takes them from the
parts that hold them. A moment of Adam is cut like its parameter, so it is saved as one more value of the same part.

Everything here works on plain dictionaries, and ranks exchange nothing.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

FORMAT = "distlab shards"
VERSION = 1
ELSEWHERE = "it was saved from a different model"
PARAMETER = "parameter"  # the key of a parameter's own value, next to the keys of the optimizer's state


@dataclass(frozen=True)
class Slab:
    """Ranges of a tensor along one dim, end to end: the part that one tensor-parallel rank holds.

    Attributes:
        dim: the dim that is cut.
        ranges: (low, high, width) each: elements low to high along dim, then padding up to a length of width.
    """

    dim: int
    ranges: tuple[tuple[int, int, int], ...]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that the ranges have together, padding included."""
        return (*whole[: self.dim], sum(width for *_, width in self.ranges), *whole[self.dim + 1 :])

    def pairs(self, own: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the same elements in both, range by range.

        Shapes: own [..., sum of widths, ...], whole [..., D, ...] -> [..., high - low, ...] each
        """
        at = 0
        for low, high, width in self.ranges:
            yield own.narrow(self.dim, at, high - low), whole.narrow(self.dim, low, high - low)
            at += width


@dataclass(frozen=True)
class SavedPart:
    """One rank's part of a tensor, and of everything that belongs to the tensor element by element.

    Attributes:
        shape: of the whole tensor.
        start: first element held, of the tensor (or of the slab) seen as a row.
        stop: one past the last; equal to start where the rank holds nothing of this tensor.
        values: [stop - start] each: the parameter, and the optimizer's moments by their names.
        numbers: what the optimizer keeps once per tensor, such as Adam's number of steps.
        slab: what tensor-parallel ranks cut out of the tensor first; None: nothing.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    values: Mapping[str, Tensor]
    numbers: Mapping[str, Any]
    slab: Slab | None = None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape whose elements start and stop count."""
        return self.shape if self.slab is None else self.slab.shape(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, numbers and tensors."""
        plain = {**vars(self), "shape": list(self.shape), "values": dict(self.values), "numbers": dict(self.numbers)}
        slab = plain.pop("slab")
        return plain if slab is None else {**plain, "slab": [slab.dim, [list(one) for one in slab.ranges]]}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SavedPart:
        """Read what `to_dict` returned."""
        dim, ranges = state.get("slab") or (0, ())
        slab = Slab(dim, tuple((low, high, width) for low, high, width in ranges)) if ranges else None
        return cls(tuple(state["shape"]), state["start"], state["stop"], state["values"], state["numbers"], slab)

    def boxes(self) -> Iterator[tuple[tuple[int, ...], dict[str, Tensor]]]:
        """Cut the part into boxes. Yield for each its first index in the whole tensor, and the values inside it.

        Shapes: values [stop - start] -> [box] each, views of them. A flat range of a matrix is at most 3 boxes: the
            end of its first row, whole rows, the beginning of its last row. Of d dimensions: at most 2d - 1.
        """
        at = 0
        for corner, sizes in _boxes_of_row(self.row_shape, self.start, self.stop):
            num = math.prod(sizes)
            box = {key: value[at : at + num].view(sizes) for key, value in self.values.items()}
            yield from [(corner, box)] if self.slab is None else _without_padding(self.slab, corner, sizes, box)
            at += num


def _boxes_of_row(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cover elements [start, stop) of a tensor seen as a row with boxes (corner, sizes), in the order of the row."""
    if not shape and start < stop:
        yield (), ()
        return
    while start < stop:
        inner = math.prod(shape[1:])
        index, begin = divmod(start, inner)
        if num := (stop - start) // inner if not begin else 0:  # whole slices
            yield (index, *[0] * (len(shape) - 1)), (num, *shape[1:])
            start += num * inner
        else:
            end = min(begin + stop - start, inner)
            yield from (((index, *c), (1, *s)) for c, s in _boxes_of_row(shape[1:], begin, end))
            start += end - begin


def _without_padding(
    slab: Slab, corner: Sequence[int], sizes: Sequence[int], box: Mapping[str, Tensor]
) -> Iterator[tuple[tuple[int, ...], dict[str, Tensor]]]:
    """Cut a box of a slab where its ranges meet, and say where the pieces are in the whole tensor."""
    dim, at = slab.dim, 0
    for low, high, width in slab.ranges:
        first, last = max(corner[dim], at), min(corner[dim] + sizes[dim], at + high - low)
        if first < last:
            place = (*corner[:dim], low + first - at, *corner[dim + 1 :])
            yield place, {key: one.narrow(dim, first - corner[dim], last - first) for key, one in box.items()}
        at += width


@dataclass(frozen=True)
class SavedShard:
    """What one rank saved.

    Attributes:
        shard: which of the shards it is.
        num_shards: how many there are.
        parts: of every tensor, by name.
        groups: the optimizer's options and the names of its tensors, one dictionary per group; None where no
            optimizer was saved.
        buffers: of the module, whole: each rank has its own.
        aliases: other names of tensors that a module has under several, each with the name used in parts.
    """

    shard: int
    num_shards: int
    parts: Mapping[str, SavedPart]
    groups: Sequence[Mapping[str, Any]] | None = None
    buffers: Mapping[str, Tensor] | None = None
    aliases: Mapping[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, numbers and tensors: what loads without running code."""
        parts = {name: part.to_dict() for name, part in self.parts.items()}
        groups = None if self.groups is None else [dict(group) for group in self.groups]
        state = {"format": FORMAT, "version": VERSION, "shard": self.shard, "num_shards": self.num_shards}
        state |= {"parts": parts, "groups": groups, "buffers": dict(self.buffers or {})}
        return state | ({"aliases": dict(self.aliases)} if self.aliases else {})

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SavedShard:
        """Read what `to_dict` returned.

        Raises:
            ValueError: it is something else, or of a different version.
        """
        if not isinstance(state, Mapping) or (state.get("format"), state.get("version")) != (FORMAT, VERSION):
            raise ValueError(
                f"this is not a saved shard (format {FORMAT!r}, version {VERSION}); pass what ShardedState or "
                "ShardedOptimizer saved, or load a whole model with load_full_state_dict(). What a different distlab "
                "saved, load there, and save the whole model"
            )
        try:
            parts = {name: SavedPart.from_dict(part) for name, part in state["parts"].items()}
            where = int(state["shard"]), int(state["num_shards"])
            return cls(*where, parts, state["groups"], state["buffers"], state.get("aliases"))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the saved shard lacks a field ({error!r}); save it again") from None

    def copied(self) -> SavedShard:
        """Return the same in host memory of its own, which training does not change."""
        own = {n: {key: v.to("cpu", copy=True) for key, v in part.values.items()} for n, part in self.parts.items()}
        return replace(self, parts={name: replace(part, values=own[name]) for name, part in self.parts.items()})


def whole_shard(
    state: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]] | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> SavedShard:
    """Read what belongs to whole tensors as a save of one shard.

    Args:
        state: by tensor name.
        groups: options, and the names of tensors.
        shapes: of the whole model's tensors.

    Raises:
        ValueError: the state has a tensor that the model has not, or one of a different shape.
    """
    for name in state:
        if name not in shapes:
            raise ValueError(f"{name} is in the saved state and not here: {ELSEWHERE}")
    keys, parts = per_element(state, shapes), {}
    for name, shape in shapes.items():
        values, numbers = apart(state.get(name, {}), shape, keys)
        for key, value in numbers.items():
            if key in keys:
                raise ValueError(
                    f"{key} of {name} is {list(value.shape)} in the saved state and {list(shape)} here; load the "
                    "state of this model"
                )
        parts[name] = SavedPart(shape, 0, math.prod(shape), values, numbers)
    return SavedShard(0, 1, parts, groups)


def per_element(state: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the keys of which there is a number for each element of a tensor: the parameter's own, and the moments.

    A tensor without dimensions cannot tell a moment from a count of steps, so the others do.
    """
    each = [(value, shapes.get(name), key) for name, kept in state.items() for key, value in kept.items()]
    return {PARAMETER, *(key for value, shape, key in each if isinstance(value, Tensor) and () != value.shape == shape)}


def apart(
    kept: Mapping[str, Any], shape: Sequence[int], keys: Container[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tell what is kept for each element of a tensor, as rows, from what is kept once.

    Shapes: values in the tensor's shape -> [elements]
    """
    rows = {
        key: value.detach().reshape(-1)
        for key, value in kept.items()
        if key in keys and isinstance(value, Tensor) and value.shape == shape
    }
    return rows, {key: value for key, value in kept.items() if key not in rows}


def check_saves(saved: Sequence[SavedShard]) -> None:
    """Refuse shards that were not saved together; each tensor rank's are a save of their own.

    Raises:
        ValueError: no shards, or a different number of shards.
    """
    if not saved:
        raise ValueError("no saved shard was given; pass the shards of all ranks of the job that saved")
    first: dict[str, SavedShard] = {}
    for one in saved:
        other = first.setdefault(str({name: part.slab for name, part in one.parts.items()}), one)
        if other.num_shards != one.num_shards or not 0 <= one.shard < one.num_shards:
            raise ValueError(
                f"shard {other.shard} of {other.num_shards} and shard {one.shard} of {one.num_shards} are from "
                "different saves; pass the shards of one"
            )


def check_tensors(
    parts: Mapping[str, Sequence[SavedPart]], expected: Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]
) -> None:
    """Refuse the state of a different model or of a different precision.

    Args:
        parts: what all saved shards hold of each tensor.
        expected: (shape, dtype) of the model's tensors, by name; dtype None where only the optimizer's state counts.

    Raises:
        ValueError: the text names the first tensor that differs, what the model has and what was saved.
    """
    for name in [*expected, *parts]:
        if name not in parts:
            raise ValueError(f"{name} is in the model and not in the saved state: {ELSEWHERE}")
        if name not in expected:
            raise ValueError(f"{name} is in the saved state and not in the model: {ELSEWHERE}")
        shape, dtype = expected[name]
        for part in parts[name]:
            if part.shape != shape:
                raise ValueError(f"{name} is {list(shape)} in the model and {list(part.shape)} in the saved state")
        kinds = {part.values[PARAMETER].dtype for part in parts[name] if PARAMETER in part.values}
        if dtype is not None and not kinds:
            raise ValueError(f"{name}: no parameters were saved; save model and optimizer together")
        if dtype is not None and kinds != {dtype}:
            mine, its = (str(one).removeprefix("torch.") for one in (dtype, *kinds - {dtype}))
            raise ValueError(
                f"{name} is {mine} in the model and {its} in the saved state; build the model in the type of the save, "
                "load, then convert it"
            )
