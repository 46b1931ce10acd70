"""The state of a sharded model and its optimizer in shards: saved by one number of ranks and loaded by another.

1. `shard_state`: this rank's shard, self-describing (see `saved`). No rank speaks to another.
2. `sharded_state_dict`: the same, and the ranks' digests, so that shards of two saves are never taken for one.
3. `load_sharded_state_dict`: from the shards that *any* number of ranks saved.
4. `ShardedState`: model and optimizer as one part of a checkpoint (`distlab.checkpoint`), one file a rank.

Whole tensors, as the module has them without sharding, are in `full_state`. Functions that speak to other ranks
are collective: every rank of the group calls them. What one rank must refuse, all refuse, before anything has changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import agree
from distlab.plan import FlatLayout
from distlab.sharding.fsdp.fully_shard import FullyShard
from distlab.sharding.state.model_state import (
    Optimizer,
    check_buffers,
    expected_tensors,
    kept_by,
    prepare_optimizer,
    saved_buffers,
    split,
    together,
)
from distlab.sharding.state.shard_format import (
    PARAMETER,
    SavedPart,
    SavedShard,
    assemble,
    check_one_save,
    check_tensors,
)


def shard_state(model: FullyShard, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return this rank's shard of the model, and of the optimizer's state, in host memory; nothing is sent.

    Raises:
        ValueError: the optimizer is of another model, or keeps what cannot be cut.
    """
    kept = {} if optimizer is None else kept_by(optimizer, model)
    shard = dist.get_rank(model.group)
    parts: dict[str, SavedPart] = {}
    for unit in model.units:
        moments, numbers = split(unit, kept[unit.name][1] if unit.name in kept else {})
        parts |= _cut(unit.layout, shard, {PARAMETER: unit.shard.detach(), **moments}, numbers)
    groups = None
    if optimizer is not None:
        groups = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "names": [
                    name for unit in model.units if kept.get(unit.name, (-1,))[0] == index for name in unit.layout.names
                ],
            }
            for index, group in enumerate(optimizer.param_groups)
        ]
    buffers = {name: value.detach().to("cpu", copy=True) for name, value in saved_buffers(model).items()}
    return SavedShard(shard, dist.get_world_size(model.group), parts, groups, buffers).to_dict()


def _cut(
    layout: FlatLayout, shard: int, values: Mapping[str, Tensor], numbers: Mapping[str, Any]
) -> Iterator[tuple[str, SavedPart]]:
    """Cut a shard's values into parts of named tensors; copies, since training goes on."""
    held = {piece.tensor: piece for piece in layout.pieces(shard)}
    for index, (name, shape) in enumerate(zip(layout.names, layout.shapes, strict=True)):
        start = stop = offset = 0
        if index in held:
            _, start, stop, offset = held[index]
        mine = {key: value[offset : offset + stop - start].to("cpu", copy=True) for key, value in values.items()}
        yield name, SavedPart(shape, start, stop, mine, dict(numbers))


def sharded_state_dict(model: FullyShard, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return this rank's shard, with the digests of all shards of this save; every rank of the group calls it.

    The dictionary holds plain values and tensors in host memory: save it with torch.save, one file a rank.

    Cost: one all-gather of 64 bytes a rank; this rank's shards are hashed.

    Raises:
        ValueError: on every rank, when any rank has an optimizer of another model, or one whose state cannot be cut.
    """
    agree(["sharded_state_dict", optimizer is not None], model.group, what="sharded_state_dict (with an optimizer)")
    saved = SavedShard.from_dict(together(model, "save the shards", lambda: shard_state(model, optimizer)))
    digests = [""] * saved.num_shards
    dist.all_gather_object(digests, saved.digest(), group=model.group)
    return dataclasses.replace(saved, digests=tuple(digests)).to_dict()


def load_sharded_state_dict(
    model: FullyShard,
    states: Sequence[Mapping[str, Any]],
    optimizer: Optimizer | None = None,
    *,
    convert: bool = False,
) -> None:
    """Take up a state that any number of ranks saved, whatever their units were; every rank of the group calls it.

    Args:
        model: of the same tensors; nothing of it has changed when an error is raised.
        states: what `sharded_state_dict` returned on all ranks, in any order. A rank that had the same shard then may
            pass its own alone.
        optimizer: takes its state from the same shards.
        convert: round values of another type to the model's.

    Cost: only the outcome of the checks is exchanged.
    Error: exact where the types are the same.

    Raises:
        ValueError: on every rank, with the text of the ranks that refused: another model, another precision, a missing
            shard, shards of two saves, or an optimizer of other groups.
    """
    agree(["load_sharded_state_dict", optimizer is not None, convert], model.group, what="load_sharded_state_dict")
    apply = together(model, "load the shards", lambda: prepare(model, states, optimizer, convert=convert))
    apply()


def prepare(
    model: FullyShard, states: Sequence[Mapping[str, Any]], optimizer: Optimizer | None = None, *, convert: bool = False
) -> Callable[[], None]:
    """Check saved shards against a model and put this rank's together; return what takes them up.

    Raises:
        ValueError: they do not fit; nothing has changed.
    """
    saved = [SavedShard.from_dict(state) for state in states]
    check_one_save(saved)
    check_tensors(saved, expected_tensors(model), convert=convert)
    shard = dist.get_rank(model.group)
    mine = {unit.name: assemble(saved, unit.layout, shard) for unit in model.units}
    own = min(saved, key=lambda one: (one.shard != shard, one.shard))  # buffers: its own, or those of the first shard
    take_state = None
    if optimizer is not None:
        kept = {
            name: {**{k: v for k, v in values.items() if k != PARAMETER}, **numbers}
            for name, (values, numbers) in mine.items()
        }
        take_state = prepare_optimizer(model, optimizer, kept, saved[0].groups)
    buffers = check_buffers(model, own.buffers or {})

    def apply() -> None:
        with torch.no_grad():
            for unit in model.units:
                unit.shard.copy_(mine[unit.name][0][PARAMETER])
            for here, there in buffers:
                here.copy_(there)
        if take_state is not None:
            take_state()

    return apply


class ShardedState:
    """A sharded model and its optimizer, as one part of a checkpoint: each rank saves its own shard.

        parts = {"training": ShardedState(model, optimizer), "schedule": schedule}
        save(directory, step, parts=parts)

    At another number of ranks `load(..., other_world_size=True)` gives it the shards of all ranks that saved.
    """

    def __init__(self, model: FullyShard, optimizer: Optimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's state."""
        return shard_state(self.model, self.optimizer)

    def check_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Refuse states that do not fit, before anything has changed.

        Raises:
            ValueError: as `load_sharded_state_dict`.
        """
        prepare(self.model, states, self.optimizer)

    def load_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up this rank's shard of what all ranks saved, or its own state as it saved it."""
        prepare(self.model, states, self.optimizer)()
