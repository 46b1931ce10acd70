"""An optimizer's step on shards: it updates the pieces that lie in them, and passes by what has no gradient.

A shard is a `Part`, which refuses most of what a program may ask of it. So an optimizer of shards works on their
pieces: plain parameters in the same memory, one for each tensor, with a state and a count of steps of its own.
Between steps its groups hold the shards, and `optimizer.state` has what it keeps by the names of tensors.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distlab.blocks.modules.moved import NotHere
from distlab.comm.together import place_in
from distlab.sharding.by_element import what_it_needs
from distlab.sharding.part import WHOLE, FlatShard, plain

Optimizer = torch.optim.Optimizer


@functools.cache  # one pair of hooks for all models, which stays: a different thread may free a model during a step
def step_on_pieces() -> None:
    """From now on, a step of an optimizer of flat shards updates their pieces.

    The step of one that does not work by element, has a group without parameters or takes a closure raises ValueError
    on every rank, and a step before `synchronize()` RuntimeError. No shard has changed then. `ByTensor`'s parts of
    tensors are no flat shards: of their optimizers only the first is asked.
    """
    taken: weakref.WeakKeyDictionary[Optimizer, list[list[Any]]] = weakref.WeakKeyDictionary()
    checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        after(optimizer)  # what a step that an error ended has left
        parts = [one for group in optimizer.param_groups for one in group["params"] if getattr(one, "is_shard", False)]
        shards = [one for one in parts if isinstance(one, FlatShard)]
        refuse_early(shards)
        if parts and optimizer not in checked:
            _check(optimizer, shards)
            checked.add(optimizer)
        if not shards:
            return
        if any(callable(one) for one in (*args[1:], *kwargs.values())):
            raise ValueError(
                f"rank {place_in(None)[0]}: step takes no closure on shards: call backward and synchronize() before it"
            )
        taken[optimizer] = _take_pieces(optimizer)

    def after(optimizer: Optimizer, *_: Any) -> None:
        if optimizer in taken:
            _take_shards(optimizer, taken.pop(optimizer))

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


@contextmanager
def on_pieces(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer hold the pieces of its shards in this block, with their states: it is a plain one of them."""
    parameters = _take_pieces(optimizer)
    try:
        yield
    finally:
        _take_shards(optimizer, parameters)


def refuse_early(shards: Iterable[FlatShard]) -> None:
    """Refuse a step, by a RuntimeError, while gradients are on their way."""
    for mark in (one.grad for one in shards if isinstance(one.grad, NotHere)):
        raise RuntimeError(f"rank {place_in(None)[0]}: {mark.why('step')}")


def _check(optimizer: Optimizer, shards: list[FlatShard]) -> None:
    """Refuse groups by name, which shards' names tell nothing of, and what does not work by element."""
    rank = f"rank {place_in(None)[0]}"
    empty = [number for number, group in enumerate(optimizer.param_groups) if not group["params"]]
    if empty and shards:
        raise ValueError(
            f"{rank}: group {empty[0]} of the optimizer has no parameters. By names or shapes all flat shards "
            "('shards.0') are in one group. Use ShardedOptimizer, whose groups are made of whole parameters; or groups "
            "of whole units, by model.units[i].name and .shard; or leave the empty group out"
        )
    cut = [group for group in optimizer.param_groups if any(getattr(one, "is_shard", False) for one in group["params"])]
    if what_it_needs(optimizer, cut) != "elements":
        raise ValueError(
            f"{rank}: {type(optimizer).__name__} updates a part of a tensor in a different way than the whole. It "
            "takes a norm of a shard (Adafactor, LAMB and LARS take one), looks at its shape, or at all parameters "
            f"seen as one long vector (LBFGS): {WHOLE}"
        )
    names = [piece.name for one in shards for piece in one.pieces]
    if len({*names}) < len(names):
        raise ValueError(f"{rank}: the optimizer has shards of two models; build an optimizer for each")


def _take_pieces(optimizer: Optimizer) -> list[list[Any]]:
    """Put the pieces of shards in their place, with gradients and states; return what the groups had."""
    before, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    for group in optimizer.param_groups:
        group["params"] = [part for one in group["params"] for part in _pieces_of(one, state)]
    return before


def _pieces_of(one: Tensor, state: dict[Any, dict[str, Any]]) -> list[Tensor]:
    if not isinstance(one, FlatShard):
        return [one]
    early = {key: _cut(value, one) for key, value in state.pop(one, {}).items()}  # Adagrad makes it when it is built
    gradients = [None] * len(one.pieces) if one.grad is None else one.cut(plain(one.grad))
    for index, (piece, gradient) in enumerate(zip(one.pieces, gradients, strict=True)):
        piece.parameter.grad = None if piece.slot in one.unused else gradient
        own = state.pop(piece.name, None) or {key: parts[index] for key, parts in early.items()}
        if own:
            state[piece.parameter] = own
    return [piece.parameter for piece in one.pieces]


def _cut(value: Any, shard: FlatShard) -> list[Any]:
    if isinstance(value, Tensor) and value.shape == shard.shape:
        return [part.clone() for part in shard.cut(plain(value))]
    return [copy.deepcopy(value) for _ in shard.pieces]


def _take_shards(optimizer: Optimizer, before: list[list[Any]]) -> None:
    """Put shards back into the groups; what is kept of their pieces stands under the names of tensors."""
    state: dict[Any, dict[str, Any]] = optimizer.state
    for group, parameters in zip(optimizer.param_groups, before, strict=True):
        group["params"] = parameters
        for one in parameters:
            if isinstance(one, FlatShard):
                plain(one)[:0].zero_()  # counts as a change of the shard: units gather it anew
                for piece in one.pieces:
                    piece.settle()
                    piece.parameter.grad = None
                    if piece.parameter in state:
                        state[piece.name] = state.pop(piece.parameter)
