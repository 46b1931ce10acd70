"""The state of a `FullyShard` model and its optimizer, in shards or whole, for any number of ranks.

In shards, which any number of ranks may load:

1. `shard_state`: this rank's shard, which says what it holds (see `named_parts`). Ranks exchange nothing.
2. `sharded_state_dict`: the same, and the ranks' digests, so that shards of two saves are never taken for one.
3. `load_sharded_state_dict`: from the shards that *any* number of ranks saved.
4. `ShardedState`: model and optimizer as one part of a checkpoint (`distlab.checkpoint`), one file per rank.

Whole, for one file that anything can read: a different number of ranks, one process, a different program. It is put
together one unit at a time, in host memory, because a rank that needs shards has no room for the whole model on its
device. To load it is to load a save of one rank.

Functions that communicate are collective: every rank of the group calls them, also where only one keeps the result. A
program that calls them on rank 0 alone makes rank 0 wait for the others; the wait ends with the group's timeout. What
one rank must refuse, all refuse, before anything has changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.comm import agree
from distlab.comm.together import together
from distlab.modules.every_parameter import every_parameter
from distlab.modules.named_parts import PARAMETER, SavedPart, SavedShard, check_saves, kept_once, whole_shard
from distlab.sharding.fsdp.fully_shard import FullyShard
from distlab.sharding.state.assemble import HeldRow
from distlab.sharding.state.optimizer_parts import (
    Groups,
    Optimizer,
    Rows,
    by_names,
    gather_parts,
    optimizer_state,
    prepare,
    save_parts,
)

Result = TypeVar("Result")


def rows_of(model: FullyShard) -> Rows:
    """Return what this rank holds: one row per unit."""
    rank = dist.get_rank(model.group)
    layouts = [(unit.shard, unit.layout) for unit in model.units]
    held = [HeldRow(shard, layout.names, layout.shapes, layout.pieces(rank)) for shard, layout in layouts]
    shapes = {name: shape for row in held for name, shape in zip(row.names, row.shapes, strict=True)}
    return Rows(held, shapes, model.cut)


def shard_state(model: FullyShard, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return this rank's shard of the model, and of the optimizer's state: views; nothing is sent.

    Raises:
        ValueError: the optimizer is of a different model, or keeps what cannot be cut.
    """
    parts, groups = save_parts(rows_of(model), optimizer, parameters=True)
    shard, num_shards = dist.get_rank(model.group), dist.get_world_size(model.group)
    tied = {name: same for name, same in aliases(model).items() if name != same}
    return SavedShard(shard, num_shards, parts, groups, copied_buffers(model), aliases=tied).to_dict()


def sharded_state_dict(model: FullyShard, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return this rank's shard, with the digests of all shards of this save; every rank of the group calls it.

    The dictionary holds plain values and tensors in host memory: save it with torch.save, one file per rank.

    Cost: one all-gather of 64 bytes per rank; this rank's shards are hashed.

    Raises:
        ValueError: on every rank, when a rank has an optimizer of a different model, or one whose state cannot be cut.
    """
    agree(["sharded_state_dict", optimizer is not None], model.group, what="sharded_state_dict (with an optimizer)")
    state = refuse_together(model, "save the shards", lambda: shard_state(model, optimizer))
    saved = SavedShard.from_dict(state).copied()
    digests = [""] * saved.num_shards
    dist.all_gather_object(digests, saved.digest(), group=model.group)
    return dataclasses.replace(saved, digests=tuple(digests)).to_dict()


def load_sharded_state_dict(
    model: FullyShard, states: Sequence[Mapping[str, Any]], optimizer: Optimizer | None = None
) -> None:
    """Load a state that any number of ranks saved, with any units. Every rank of the group calls this.

    Args:
        model: of the same tensors; nothing of it has changed when an error is raised.
        states: what `sharded_state_dict` returned on all ranks, in any order. A rank that had the same shard then may
            pass its own alone.
        optimizer: takes its state from the same shards.

    Cost: only the outcome of the checks is exchanged.
    Error: exact.

    Raises:
        ValueError: on every rank, with the text of the ranks that refused: a different model or precision, a missing
            shard, shards of two saves, or an optimizer of other groups.
    """
    agree(["load_sharded_state_dict", optimizer is not None], model.group, what="load_sharded_state_dict")
    refuse_together(model, "load the shards", lambda: prepare_model(model, _checked(states), optimizer))()


def _checked(states: Sequence[Mapping[str, Any]]) -> list[SavedShard]:
    saved = [SavedShard.from_dict(state) for state in states]
    check_saves(saved)
    return saved


def prepare_model(
    model: FullyShard, saved: Sequence[SavedShard], optimizer: Optimizer | None = None
) -> Callable[[], None]:
    """Check saved shards against a model and assemble this rank's; return a function that loads it.

    Raises:
        ValueError: they do not fit; nothing has changed.
    """
    load = prepare(rows_of(model), optimizer, saved, parameters=True)
    rank = dist.get_rank(model.group)
    own = min(saved, key=lambda one: (one.shard != rank, one.shard))  # buffers: its own, or those of the first shard
    here, there = _buffers(model), own.buffers or {}
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


class ShardedState:
    """A sharded model and its optimizer, as one part of a checkpoint: each rank saves its own shard.

        parts = {"training": ShardedState(model, optimizer), "schedule": schedule}
        save(directory, step, parts=parts)

    At a different number of ranks `load(..., reshard=True)` gives it the shards of all ranks that saved.
    """

    def __init__(self, model: FullyShard, optimizer: Optimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's state: views, to save or copy before the next update."""
        return shard_state(self.model, self.optimizer)

    def check_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Refuse states that do not fit, before anything has changed.

        Raises:
            ValueError: as `load_sharded_state_dict`.
        """
        prepare_model(self.model, _checked(states), self.optimizer)

    def load_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's shard from the states of all ranks, or from the state that this rank saved."""
        prepare_model(self.model, _checked(states), self.optimizer)()


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
    keeps = _keeps(model, "full_state_dict", to_rank)
    parts, _ = save_parts(rows_of(model), None, parameters=True)
    whole = _gather(model, parts, keeps=keeps)
    if not keeps:
        return {}
    found = {name: one.values[PARAMETER].view(one.shape) for name, one in whole.items()} | copied_buffers(model)
    return {name: found[same] for name, same in aliases(model).items()}


def full_optimizer_state(model: FullyShard, optimizer: Optimizer, *, to_rank: int | None = None) -> dict[str, Any]:
    """Return the optimizer's state for whole tensors, by their names, in host memory; every rank of the group calls it.

    A plain optimizer of the same groups of the whole model loads it by its own `load_state_dict`.

    Returns:
        {"state": {name: {"exp_avg": whole tensor, "step": number}}, "param_groups": [{options, "params": [names]}]},
        with the names in the order of `module.parameters()`; {} for a tensor that was never updated.

    Cost: one all-gather per unit of all moments; where layers are cut, one more over the tensor ranks.

    Raises:
        ValueError: on every rank: the optimizer is of a different model, or keeps what belongs to no element.
    """
    keeps = _keeps(model, "full_optimizer_state", to_rank)
    parts, groups = refuse_together(
        model, "gather the optimizer's state", lambda: save_parts(rows_of(model), optimizer, parameters=False)
    )
    whole = _gather(model, parts, keeps=keeps)
    return optimizer_state(whole, groups or (), _in_order(model, groups or ())) if keeps else {}


def load_full_state_dict(model: FullyShard, state: Mapping[str, Tensor]) -> None:
    """Take up a whole module's state; every rank of the group calls it.

    Args:
        model: nothing of it has changed when an error is raised.
        state: with the names of `module.state_dict()`, on every rank; a file may be read with `torch.load(mmap=True)`.

    Cost: only the outcome of the checks is exchanged.
    Error: exact.

    Raises:
        ValueError: on every rank: the state is of a different model or a different precision.
    """
    agree(["load_full_state_dict"], model.group, what="load_full_state_dict")
    refuse_together(model, "load the whole state", lambda: prepare_model(model, [_as_shard(model, state)]))()


def load_full_optimizer_state(model: FullyShard, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Take up what `full_optimizer_state` returned, or a plain optimizer's `state_dict()`, on every rank.

    Raises:
        ValueError: on every rank: the state is of a different model, or the optimizer has other groups.
    """

    def look() -> Callable[[], None]:
        rows = rows_of(model)
        _, groups = save_parts(rows, optimizer, parameters=False)
        kept, its_groups = by_names(state, _in_order(model, groups or ()))
        values = [(key, value) for one in kept.values() for key, value in one.items()]
        per_element = {key for key, value in values if isinstance(value, Tensor) and value.dim()}
        shapes = rows.whole_shapes()
        whole = whole_shard(kept, its_groups, shapes, kept_once(kept, shapes) - per_element)
        return prepare(rows, optimizer, [whole], parameters=False)

    agree(["load_full_optimizer_state"], model.group, what="load_full_optimizer_state")
    refuse_together(model, "load the optimizer's state", look)()


def _keeps(model: FullyShard, what: str, to_rank: int | None) -> bool:
    """Return whether this rank keeps what all gather, which is the same call on every rank."""
    agree([what, to_rank], model.group, what=f"the call of {what}")
    num_ranks = dist.get_world_size(model.group)
    if to_rank is not None and not 0 <= to_rank < num_ranks:
        raise ValueError(f"{what}: rank {to_rank!r} is none of the group's 0..{num_ranks - 1}")
    return to_rank in (None, dist.get_rank(model.group))


def _gather(model: FullyShard, parts: Mapping[str, SavedPart], *, keeps: bool) -> dict[str, SavedPart]:
    groups: list[ProcessGroup | None] = [model.group, *([] if model.cut.group is None else [model.cut.group])]
    whole: dict[str, SavedPart] = {}
    for unit in model.units:
        whole |= gather_parts(parts, unit.layout.names, groups, keeps=keeps)
    return whole


def _as_shard(model: FullyShard, state: Mapping[str, Tensor]) -> SavedShard:
    """Read a module's state as a save of one shard."""
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is {type(state).__name__}; pass a module's state_dict() on every rank")
    known, buffers = aliases(model), _buffers(model)
    for name in [*known, *state]:
        if name not in known or name not in state:
            here, there = ("nothing" if name not in one else "a tensor" for one in (known, state))
            raise ValueError(
                f"{name} is {there} in the state and {here} in the model: the state was saved from a different model; "
                "load one with the same tensors"
            )
        if name != known[name] and not torch.equal(state[name], state[known[name]]):
            raise ValueError(f"{name} and {known[name]} are one parameter in the model, of two values in the state")
    own = {same: {PARAMETER: state[same]} for same in known.values() if same not in buffers}
    whole = whole_shard(own, None, {name: tuple(state[name].shape) for name in own})
    return dataclasses.replace(whole, buffers={name: state[name] for name in buffers})


def _in_order(model: FullyShard, groups: Groups) -> list[list[str]]:
    """Return the names in each group of an optimizer, in the order of `module.parameters()`."""
    places = {name: place for place, (name, _) in enumerate(every_parameter(model.module))}
    return [sorted(group["names"], key=places.__getitem__) for group in groups]


def refuse_together(model: FullyShard, what: str, action: Callable[[], Result]) -> Result:
    """Run an action that changes nothing on every rank; where it refuses on one, refuse on all with the same text.

    Raises:
        ValueError: on every rank of the group and of its replicas, when the action raised ValueError on any.
    """
    kept: list[Result] = []
    in_group = partial(together, lambda: kept.append(action()), model.group, what=what)
    if model.replicas is None:
        in_group()
    else:
        together(lambda: in_group() and None, model.replicas, what=what)
    return kept[0]


def _buffers(model: FullyShard) -> dict[str, Tensor]:
    """Return the module's buffers that belong to its state, by name: each rank has its own.

    Raises:
        ValueError: a module keeps more than tensors in its state.
    """
    modules = [*model.module.named_modules(remove_duplicate=False)]
    for path, one in modules:
        if type(one).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"{path} has an extra state (get_extra_state), which shards do not save; keep it in a buffer"
            )
    return {name: buffer for path, one in modules for name, buffer in _own_buffers(path, one)}


def copied_buffers(model: FullyShard) -> dict[str, Tensor]:
    """Return copies of the module's buffers in host memory."""
    return {name: value.detach().to("cpu", copy=True) for name, value in _buffers(model).items()}


def aliases(model: FullyShard) -> dict[str, str]:
    """Return every name of the module's state, with the one under which its shards know it (tied: the first)."""
    own: dict[nn.Module, list[tuple[str, str]]] = {}
    for unit in model.units:
        for place in unit.members.places:
            own.setdefault(place.module, []).append((place.attribute, unit.layout.names[place.tensor]))
    names: dict[str, str] = {}
    for path, one in model.module.named_modules(remove_duplicate=False):
        names |= {_join(path, attribute): name for attribute, name in own.get(one, ())}
        names |= {name: name for name, _ in _own_buffers(path, one)}
    return names


def _own_buffers(path: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield _join(path, key), buffer


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
