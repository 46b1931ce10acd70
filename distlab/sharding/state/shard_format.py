"""Saved shards: what a rank writes of a sharded model, and how other ranks put their own shards together from it.

A shard means nothing without the number of shards it was cut into, and the next run may have another number. So a rank
saves *named parts of tensors*: "of `blocks.0.norm.weight`, elements 12 to 24". A rank of another job, with shards of
other bounds or units of other sizes, asks for the elements it needs by name and takes them from whoever has them. A
moment of Adam is cut like its parameter, so it travels as one more value of the same part.

Everything here works on plain dictionaries, and no rank speaks to another: see `state_dict` for that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.plan import FlatLayout

FORMAT = "distlab shards"
VERSION = 1
PARAMETER = "parameter"  # the key of a parameter's own value, beside those of the optimizer's state


class Copy(NamedTuple):
    """Take `size` elements from place `source_start` of piece `source`, to place `target_start`."""

    source: int
    source_start: int
    target_start: int
    size: int


def plan_copies(start: int, stop: int, held: Sequence[tuple[int, int]]) -> tuple[Copy, ...]:
    """Cover elements [start, stop) of a tensor from pieces that hold [low, high) of it each, with the fewest copies.

    Raises:
        ValueError: some elements are in no piece; the text says which.
    """
    copies, at = [], start
    while at < stop:
        reach = [(min(high, stop), index) for index, (low, high) in enumerate(held) if low <= at < high]
        if not reach:
            until = min((low for low, high in held if at < low < high), default=stop)
            raise ValueError(f"elements {at} to {min(until, stop)}")
        end, source = max(reach, key=lambda found: (found[0], -found[1]))
        copies.append(Copy(source, at - held[source][0], at - start, end - at))
        at = end
    return tuple(copies)


@dataclass(frozen=True)
class SavedPart:
    """One rank's part of a tensor, and of all that belongs to the tensor element by element.

    Attributes:
        shape: of the whole tensor.
        start: first element held, of the tensor seen as a row.
        stop: one past the last; equal to start where the rank holds nothing of this tensor.
        values: [stop - start] each: the parameter, and the optimizer's moments by their names.
        numbers: what the optimizer keeps once a tensor, such as Adam's number of steps.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    values: Mapping[str, Tensor]
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class SavedShard:
    """What one rank saved.

    Attributes:
        shard: which of the shards it is.
        num_shards: how many there are.
        parts: of every tensor, by name.
        groups: the optimizer's options, one dictionary a group; None where no optimizer was saved.
        buffers: of the module, whole: each rank has its own.
        digests: of all shards of the same save, in order; empty where the ranks did not compare.
    """

    shard: int
    num_shards: int
    parts: Mapping[str, SavedPart]
    groups: Sequence[Mapping[str, Any]] | None = None
    buffers: Mapping[str, Tensor] | None = None
    digests: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, numbers and tensors: what loads without running code."""
        parts = {
            name: {
                "shape": list(part.shape),
                "start": part.start,
                "stop": part.stop,
                "values": dict(part.values),
                "numbers": dict(part.numbers),
            }
            for name, part in self.parts.items()
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "shard": self.shard,
            "num_shards": self.num_shards,
            "parts": parts,
            "groups": None if self.groups is None else [dict(group) for group in self.groups],
            "buffers": dict(self.buffers or {}),
            "digests": list(self.digests),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SavedShard:
        """Read what `to_dict` returned.

        Raises:
            ValueError: it is something else, or of another version.
        """
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise ValueError(
                f"this is not a saved shard (no format {FORMAT!r}); pass what sharded_state_dict() returned, or load "
                "the state of a whole module with load_full_state_dict()"
            )
        if state.get("version") != VERSION:
            raise ValueError(f"the saved shard has version {state.get('version')!r}; this distlab reads {VERSION}")
        try:
            parts = {
                name: SavedPart(tuple(part["shape"]), part["start"], part["stop"], part["values"], part["numbers"])
                for name, part in state["parts"].items()
            }
            return cls(
                int(state["shard"]),
                int(state["num_shards"]),
                parts,
                state["groups"],
                state["buffers"],
                tuple(state["digests"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the saved shard lacks a field ({error!r}); save it again") from None

    def digest(self) -> str:
        """Return a hash of all that is in it, the digests of the save apart."""
        hashed = hashlib.sha256()
        _feed(hashed, {**self.to_dict(), "digests": []})
        return hashed.hexdigest()


def _feed(hashed: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        hashed.update(f"{value.dtype}{list(value.shape)}".encode())
        hashed.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key in value:
            hashed.update(repr(key).encode())
            _feed(hashed, value[key])
    elif isinstance(value, list | tuple):
        hashed.update(f"{len(value)}".encode())
        for item in value:
            _feed(hashed, item)
    else:
        hashed.update(json.dumps(value, default=repr).encode())


def check_one_save(saved: Sequence[SavedShard]) -> None:
    """Refuse shards that were not saved together, or that changed since.

    Raises:
        ValueError: no shards, another number of shards, another save, or changed values; the text names the shards.
    """
    if not saved:
        raise ValueError("no saved shard was given; pass those of all ranks of the job that saved")
    first = saved[0]
    for other in saved[1:]:
        if other.num_shards != first.num_shards:
            raise ValueError(
                f"shard {first.shard} is one of {first.num_shards} and shard {other.shard} one of "
                f"{other.num_shards}: they are of different saves; pass the shards of one"
            )
        if other.digests != first.digests:
            raise ValueError(
                f"shards {first.shard} and {other.shard} are of different saves (the digests of their saves differ); "
                "pass the shards of one"
            )
    for one in saved:
        if not 0 <= one.shard < one.num_shards:
            raise ValueError(f"a saved shard calls itself shard {one.shard} of {one.num_shards}; save it again")
        if one.digests and one.digest() != one.digests[one.shard]:
            raise ValueError(
                f"shard {one.shard} was changed after it was saved (its SHA-256 differs); use another save"
            )


def check_tensors(
    saved: Sequence[SavedShard], expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, convert: bool = False
) -> None:
    """Refuse the state of another model or of another precision.

    Args:
        saved: the shards.
        expected: (shape, dtype) of the model's tensors, by name.
        convert: take values of another type, rounded to the model's.

    Raises:
        ValueError: the text names the first tensor that differs, what the model has and what was saved.
    """
    for one in saved:
        for name in [*expected, *one.parts]:
            if name not in one.parts:
                raise ValueError(f"{name} is in the model and not in the saved shards: they are of another model")
            if name not in expected:
                raise ValueError(f"{name} is in the saved shards and not in the model: they are of another model")
            shape, dtype = expected[name]
            part = one.parts[name]
            if part.shape != shape:
                raise ValueError(f"{name} is {list(shape)} in the model and {list(part.shape)} in the saved shards")
            kind = part.values[PARAMETER].dtype
            if kind != dtype and not convert:
                raise ValueError(
                    f"{name} is {_short(dtype)} in the model and {_short(kind)} in the saved shards; pass convert=True "
                    "to round the values, or build the model in the type of the save"
                )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def assemble(saved: Sequence[SavedShard], layout: FlatLayout, shard: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Put one shard of a layout together from shards that were cut in any way.

    Returns:
        The shard's values by key ([shard_size] each, padding zero): the parameters and the optimizer's moments; and
        what the optimizer keeps once a shard.

    Raises:
        ValueError: a part is in none of the saved shards, or the tensors of the unit have different numbers.
    """
    parts = {name: [one.parts[name] for one in saved] for name in layout.names}
    kinds = {key: value.dtype for key, value in parts[layout.names[0]][0].values.items()}
    for name, same in parts.items():
        for one, part in zip(saved, same, strict=True):
            if part.values.keys() != kinds.keys():
                raise ValueError(
                    f"{name} has {sorted(part.values)} in shard {one.shard} and {layout.names[0]} has {sorted(kinds)}: "
                    "tensors of one unit must have the same optimizer state"
                )
    values = {key: torch.zeros(layout.shard_size, dtype=dtype) for key, dtype in kinds.items()}
    for piece in layout.pieces(shard):
        name = layout.names[piece.tensor]
        try:
            copies = plan_copies(piece.start, piece.stop, [(part.start, part.stop) for part in parts[name]])
        except ValueError as gap:
            have = sorted({one.shard for one in saved})
            missing = [index for index in range(saved[0].num_shards) if index not in have]
            which = f"shards {missing} of {saved[0].num_shards} are missing" if missing else "no shard has them"
            raise ValueError(f"{name}: {gap} were not given: {which}; pass the saved shards of all ranks") from None
        for copy in copies:
            for key, whole in values.items():
                at = piece.offset + copy.target_start
                source = parts[name][copy.source].values[key]
                whole[at : at + copy.size] = source[copy.source_start : copy.source_start + copy.size]
    return values, _one_number(parts)


def _one_number(parts: Mapping[str, Sequence[SavedPart]]) -> dict[str, Any]:
    """Return the numbers that all tensors of a unit share, and refuse those in which they differ."""
    (first, same), *_ = parts.items()
    numbers = dict(same[0].numbers)
    for name, others in parts.items():
        for part in others:
            for key in {**numbers, **part.numbers}:
                mine, its = (str(one.get(key, "nothing")) for one in (numbers, part.numbers))
                if mine != its:
                    raise ValueError(
                        f"{key} is {mine} for {first} and {its} for {name}, which share a shard, and a shard has one "
                        f"{key}: wrap them in different units"
                    )
    return numbers
