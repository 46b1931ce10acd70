"""The state of a `FullyShard` model and its optimizer, in shards or whole, for any number of ranks.

In shards, which any number of ranks may load: `ShardedState`, model and optimizer as one part of a checkpoint
(`distlab.checkpoint`), one file per rank. A shard says what it holds (see `named_parts`), so that *any* number of ranks
may take it up. Ranks exchange nothing.

The model whole (`full_state_dict`), for one file that anything can read: a different number of ranks, one process, a
different program. It is put together one unit at a time, in host memory, because a rank that needs shards has no room
for the whole model on its device. To load it is to load a save of one rank.

Functions that communicate are collective: every rank of the group calls them, also where only one keeps the result. A
program that calls them on rank 0 alone makes rank 0 wait for the others; the wait ends with the group's timeout. What
one rank must refuse, all refuse, before anything has changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.blocks.modules.named_parts import PARAMETER, SavedShard, whole_shard
from distlab.comm import agree
from distlab.comm.together import together
from distlab.sharding.cut_layers import OwnPieces
from distlab.sharding.fsdp.fully_shard import FullyShard
from distlab.sharding.fsdp.resharded import ReshardedParameter, names_of_others
from distlab.sharding.state.parts import Optimizer, SavedInShards, by_names, gather_parts, prepare, save_parts


def pieces_of(model: FullyShard) -> OwnPieces:
    """Return what this rank holds: pieces of all units."""
    held = [(unit.layout, unit.shard.dtype, unit.shard.pieces) for unit in model.units]
    return OwnPieces.of(held, model.cut, model.group)


class ShardedState(SavedInShards):
    """A sharded model and its optimizer, as one part of a checkpoint: each rank saves its own shard.

        parts = {"training": ShardedState(model, optimizer), "schedule": schedule}
        save(directory, step, parts=parts)

    At a different number of ranks `load(..., reshard=True)` gives it the shards of all ranks that saved.
    """

    def __init__(self, model: FullyShard, optimizer: Optimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's state: views, to save or copy before the next update; nothing is sent.

        Raises:
            ValueError: the optimizer is of a different model, or keeps what cannot be cut.
        """
        aliases, buffers = _state_of(self.model)
        parts, groups = save_parts(pieces_of(self.model), self.optimizer, parameters=True)
        place = dist.get_rank(self.model.group), dist.get_world_size(self.model.group)
        tied = {name: same for name, same in aliases.items() if name != same}
        return SavedShard(*place, parts, groups, _copied(buffers), aliases=tied).to_dict()

    def prepare_shards(self, saved: Sequence[SavedShard]) -> Callable[[], None]:
        """Assemble this rank's pieces and buffers from saved shards; return a function that loads them.

        Raises:
            ValueError: they do not fit; nothing has changed.
        """
        load = prepare(pieces_of(self.model), self.optimizer, saved, parameters=True)
        rank = dist.get_rank(self.model.group)
        own = min(saved, key=lambda one: (one.shard != rank, one.shard))  # buffers: its own, or the first shard's
        here, there = _state_of(self.model)[1], own.buffers or {}
        for name in [*here, *there]:
            mine, its = (list(one[name].shape) if name in one else "nothing" for one in (here, there))
            if mine != its:
                raise ValueError(f"buffer {name} is {mine} in the model, {its} in the saved state of a different model")

        @torch.no_grad()
        def take() -> None:
            load()
            for name, buffer in here.items():
                buffer.copy_(there[name])

        return take


def full_state_dict(model: FullyShard, *, to_rank: int | None = None) -> dict[str, Tensor]:
    """Return the whole module's state, with the names of `module.state_dict()`, in host memory.

    Tied names share a tensor. Buffers are those of this rank. Layers that tensor parallelism cut are whole in it. There
    must be memory for the result, the shards and one unit.

    Args:
        model: every rank of its group calls this.
        to_rank: the only rank of the group that keeps the result; the others get {}. None: all keep it.

    Shapes: shards [padded elements / n] -> each tensor in its whole shape.
    Cost: one all-gather per unit of its shards; where layers are cut, one more over the tensor ranks.
    Error: exact.

    Raises:
        ValueError: on every rank: ranks call it with other options, or `to_rank` is outside the group.
    """
    agree(["full_state_dict", to_rank], model.group, what="the call of full_state_dict")
    num_ranks = dist.get_world_size(model.group)
    if to_rank is not None and not 0 <= to_rank < num_ranks:
        raise ValueError(f"full_state_dict: rank {to_rank!r} is none of the group's 0..{num_ranks - 1}")
    keeps = to_rank in (None, dist.get_rank(model.group))
    aliases, buffers = _state_of(model)
    own = pieces_of(model)
    groups = [own.group, *([] if own.cut.group is None else [own.cut.group])]  # those who share, those who cut it
    whole = gather_parts(save_parts(own, None, parameters=True)[0], own.together, groups, keeps=keeps)
    if not keeps:
        return {}
    found = {name: one.values[PARAMETER].view(one.shape) for name, one in whole.items()} | _copied(buffers)
    return {name: found[same] for name, same in aliases.items()}


def load_full_state_dict(
    model: FullyShard,
    state: Mapping[str, Tensor],
    optimizer: Optimizer | None = None,
    optimizer_state: Mapping[str, Any] | None = None,
) -> None:
    """Take up a whole module's state; every rank of the group calls it.

    Args:
        model: nothing of it has changed when an error is raised.
        state: with the names of `module.state_dict()`, on every rank; a file may be read with `torch.load(mmap=True)`.
        optimizer: the model's, which takes up `optimizer_state`.
        optimizer_state: by names of tensors, as `distlab.checkpoint.read_dcp` returns it under "optimizer".

    Cost: only the outcome of the checks is exchanged.
    Error: exact.

    Raises:
        ValueError: on every rank: the state is of a different model or a different precision.
    """
    agree(["load_full_state_dict", optimizer is None], model.group, what="the call of load_full_state_dict")
    if (optimizer is None) != (optimizer_state is None):
        raise ValueError("pass an optimizer and its state together; the state of a whole optimizer has names")
    take: list[Callable[[], None]] = []
    what, part = "load the whole state", ShardedState(model, optimizer)
    whole = partial(_as_shard, model, state, optimizer_state)
    in_group = partial(together, lambda: take.append(part.prepare_shards([whole()])), model.group)
    if model.replicas is None:
        in_group(what=what)
    else:
        together(lambda: in_group(what=what), model.replicas, what=what)
    take[0]()


def _as_shard(model: FullyShard, state: Mapping[str, Tensor], optimizer_state: Mapping[str, Any] | None) -> SavedShard:
    """Read a module's state, and its optimizer's, as a save of one shard."""
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is {type(state).__name__}; pass a module's state_dict() on every rank")
    known, buffers = _state_of(model)
    for name in [*known, *state]:
        if name not in known or name not in state:
            here, there = ("nothing" if name not in one else "a tensor" for one in (known, state))
            raise ValueError(
                f"{name} is {there} in the state and {here} in the model: the state was saved from a different model; "
                "load one with the same tensors"
            )
        if name != known[name] and not torch.equal(state[name], state[known[name]]):
            raise ValueError(f"{name} and {known[name]} are one parameter in the model, of two values in the state")
    moments, groups = ({}, None) if optimizer_state is None else by_names(optimizer_state)
    own = {same: {PARAMETER: state[same]} for same in known.values() if same not in buffers}
    shapes = {name: tuple(state[name].shape) for name in own}
    own |= {name: own.get(name, {}) | kept for name, kept in moments.items()}
    return dataclasses.replace(whole_shard(own, groups, shapes), buffers={name: state[name] for name in buffers})


def _state_of(model: FullyShard) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return every name of the module's state, with the one under which its shards know it (tied: the first); buffers.

    Raises:
        ValueError: a module keeps more than tensors in its state, or parameters are whole now.
    """
    for name in names_of_others(model.module, model.units, model.shards):
        raise ValueError(f"{name} is not in a shard now; save and load outside of summon() and of forward")
    state = model.module.state_dict(keep_vars=True)
    for name in state:
        path, _, key = name.rpartition(".")
        if key == "_extra_state":
            text = f"{path} has an extra state (get_extra_state), which shards do not save; keep it in a buffer"
            raise ValueError(text)
    aliases = {name: one.label if isinstance(one, ReshardedParameter) else name for name, one in state.items()}
    return aliases, {name: one for name, one in state.items() if not isinstance(one, ReshardedParameter)}


def _copied(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in buffers.items()}
