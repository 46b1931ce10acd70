"""The format of saved shards: named parts of tensors, from which ranks with any other shards put their own together.

A shard means nothing without the number of shards it was cut into, and the next run may have another number. So each
rank saves *named parts of tensors*: "of `blocks.0.norm.weight`, elements 12 to 24". A rank of another job may have
shards of other bounds or units of other sizes. It asks for the elements it needs by name and takes them from the parts
that hold them. A moment of Adam is cut like its parameter, so it is saved as one more value of the same part.

Everything here works on plain dictionaries, and ranks exchange nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FORMAT = "distlab shards"
VERSION = 1
PARAMETER = "parameter"  # the key of a parameter's own value, next to the keys of the optimizer's state


@dataclass(frozen=True)
class SavedPart:
    """One rank's part of a tensor, and of everything that belongs to the tensor element by element.

    Attributes:
        shape: of the whole tensor.
        start: first element held, of the tensor seen as a row.
        stop: one past the last; equal to start where the rank holds nothing of this tensor.
        values: [stop - start] each: the parameter, and the optimizer's moments by their names.
        numbers: what the optimizer keeps once per tensor, such as Adam's number of steps.
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
        groups: the optimizer's options and the names of its tensors, one dictionary per group; None where no
            optimizer was saved.
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
            name: {**vars(part), "shape": list(part.shape), "values": dict(part.values), "numbers": dict(part.numbers)}
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
                f"this is not a saved shard (no format {FORMAT!r}); pass what sharded_state_dict() or a "
                "ShardedOptimizer's state_dict() returned, or load a whole state with load_full_state_dict(). If an "
                "earlier distlab saved it, load it there and save the whole state"
            )
        if state.get("version") != VERSION:
            raise ValueError(
                f"the saved shard has version {state.get('version')!r}; this distlab reads {VERSION}: load it with the "
                "distlab that saved it, and save the full state there"
            )
        try:
            parts = {
                name: SavedPart(tuple(part["shape"]), part["start"], part["stop"], part["values"], part["numbers"])
                for name, part in state["parts"].items()
            }
            digests = tuple(state["digests"])
            return cls(int(state["shard"]), int(state["num_shards"]), parts, state["groups"], state["buffers"], digests)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the saved shard lacks a field ({error!r}); save it again") from None

    def digest(self) -> str:
        """Return a hash of everything in it, except the digests of the save."""
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
        raise ValueError("no saved shard was given; pass the shards of all ranks of the job that saved")
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
    saved: Sequence[SavedShard],
    expected: Mapping[str, tuple[tuple[int, ...], torch.dtype | None]],
    *,
    convert: bool = False,
) -> None:
    """Refuse the state of another model or of another precision.

    Args:
        saved: the shards.
        expected: (shape, dtype) of the model's tensors, by name; dtype None where only the optimizer's state counts.
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
            if dtype is None:
                continue
            if PARAMETER not in part.values:
                raise ValueError(f"{name}: the saved shards hold no parameters; save model and optimizer together")
            kind = part.values[PARAMETER].dtype
            if kind != dtype and not convert:
                mine, its = (str(one).removeprefix("torch.") for one in (dtype, kind))
                raise ValueError(
                    f"{name} is {mine} in the model and {its} in the saved shards; pass convert=True to round the "
                    "values, or build the model in the type of the save"
                )
