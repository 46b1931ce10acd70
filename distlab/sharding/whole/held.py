"""What ranks hold of each tensor of a sharded model, whichever way it was cut: flat shards, or rows of each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from distlab.sharding.by_tensor import ByTensor
from distlab.sharding.fsdp.fully_shard import FullyShard
from distlab.sharding.fsdp.step import give_back, refuse_early, take_pieces

Sharded: TypeAlias = "FullyShard | ByTensor"


class HeldTensor(NamedTuple):
    """A tensor that trains, and what each rank holds of it.

    Attributes:
        name, shape: of the whole tensor.
        part: this rank's elements, as an optimizer by element updates them; they may be none.
        ranges: of each rank the first of its elements, of the tensor seen as a row, and one past the last.
        device: where it is whole; the part of an offloaded model lies in the host's memory.
    """

    name: str
    shape: tuple[int, ...]
    part: nn.Parameter
    ranges: tuple[tuple[int, int], ...]
    device: torch.device

    def size(self, rank: int) -> int:
        """Return how many elements a rank holds."""
        start, stop = self.ranges[rank]
        return stop - start


def held_by(model: Sharded) -> list[HeldTensor]:
    """Return all tensors that train, in one order on all ranks; nothing is sent.

    Raises:
        ValueError: the model is not sharded.
    """
    if isinstance(model, FullyShard):
        return _in_units(model)
    if isinstance(model, ByTensor):
        return _in_rows(model)
    raise ValueError(f"the model is a {type(model).__name__}; pass a FullyShard or a ByTensor")


@contextmanager
def gradients_of(model: Sharded) -> Iterator[None]:
    """Let each part have its gradient in this block, or None, and take what a step makes of it; refuse early ones."""
    shards = [unit.shard for unit in model.units if unit.shard.requires_grad] if isinstance(model, FullyShard) else []
    refuse_early(shards)
    for one in shards:
        take_pieces(one, {})
    try:
        yield
    finally:
        for one in shards:
            give_back(one, {})


def _in_units(model: FullyShard) -> list[HeldTensor]:
    found = []
    for unit in (unit for unit in model.units if unit.shard.requires_grad):
        own = {piece.slot: piece.parameter for piece in unit.shard.pieces}
        ranges = [[(0, 0)] * unit.layout.num_shards for _ in unit.layout.names]
        for rank in range(unit.layout.num_shards):
            for slot, start, stop, _ in unit.layout.pieces(rank):
                ranges[slot][rank] = start, stop
        nothing = nn.Parameter(unit.shard.to_local()[:0])
        for slot, (name, shape) in enumerate(zip(unit.layout.names, unit.layout.shapes, strict=True)):
            found.append(HeldTensor(name, shape, own.get(slot, nothing), tuple(ranges[slot]), unit.options.device))
    return found


def _in_rows(model: ByTensor) -> list[HeldTensor]:
    num_ranks, found = dist.get_world_size(model.group), []
    for unit in model.units:
        for name, shape, part in zip(unit.members.names, unit.shapes, unit.parts, strict=True):
            if part.requires_grad:
                row = shape.numel() // max(1, shape[0])
                edges = [min(rank * -(-shape[0] // num_ranks), shape[0]) * row for rank in range(num_ranks + 1)]
                found.append(HeldTensor(name, tuple(shape), part, tuple(pairwise(edges)), part.device))
    return found
