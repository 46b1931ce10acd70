"""An optimizer's step on shards: it updates plain parameters in the same memory, and passes by what has no gradient.

A shard is a `Part`, which refuses most of what a program may ask of it. An optimizer was tried on parts (`by_element`)
before its first step; then each step finds a plain parameter in the place of each shard. Where tensors of a shard
differ in what the step does to them, each tensor's piece is a parameter of its own, with its own state. What the
optimizer counts per parameter, such as Adam's steps, is then kept per tensor, also in what is saved.
"""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distlab.plan.sharding import Piece
from distlab.sharding.by_element import what_it_needs
from distlab.sharding.part import WHOLE, FlatShard, Part, plain
from distlab.sharding.state.assemble import BY_TENSOR, of_row

State = dict[Tensor, dict[str, Any]]


class _Taken(NamedTuple):
    """A group of an optimizer, its parameters as they were, and what stands for each shard among them."""

    group: dict[str, Any]
    parameters: list[Any]
    plain: list[tuple[FlatShard, list[nn.Parameter]]]


@functools.cache  # one pair of hooks for all models, which stays: another thread may free a model during a step
def step_on_plain_parameters() -> None:
    """From now on, optimizers of shards update plain parameters in their place.

    The step of one that does not work by element, has a group without parameters or takes a closure raises ValueError
    on every rank, and a step before `synchronize()` RuntimeError. No shard has changed then.
    """
    taken: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[_Taken]] = weakref.WeakKeyDictionary()
    checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        after(optimizer)  # what a step that an error ended has left
        shards = [one for group in optimizer.param_groups for one in group["params"] if isinstance(one, FlatShard)]
        if not shards:
            return
        why = next((one.grad.why for one in shards if isinstance(one.grad, Part) and one.grad.why), "")
        if why:
            raise RuntimeError(f"{_rank()}: {why}")
        if optimizer not in checked:
            _check(optimizer)
            checked.add(optimizer)
        if any(callable(one) for one in (*args[1:], *kwargs.values())):
            raise ValueError(f"{_rank()}: step takes no closure on shards: call backward and synchronize() before it")
        taken[optimizer] = [_take(optimizer.state, group) for group in optimizer.param_groups]

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, parameters, given in taken.pop(optimizer, []):
            group["params"] = parameters
            for shard, pieces in given:
                _take_back(optimizer.state, shard, pieces)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _check(optimizer: torch.optim.Optimizer) -> None:
    """Refuse groups by name, which shards' names tell nothing of, and what does not work by element."""
    empty = [number for number, group in enumerate(optimizer.param_groups) if not group["params"]]
    if empty:
        raise ValueError(
            f"{_rank()}: group {empty[0]} of the optimizer has no parameters. Was it made by names or shapes? "
            "FullyShard's are flat shards, 'shards.0', in which parameters of several names lie: all are in one group "
            "now. Use ShardedOptimizer, whose groups are made of whole parameters; or groups of whole units, by "
            "model.units[i].name and .shard; or leave the empty group out"
        )
    if what_it_needs(optimizer) != "elements":
        raise ValueError(
            f"{_rank()}: {type(optimizer).__name__} updates a part of a tensor in another way than the whole. It takes "
            "a norm of a shard (Adafactor, LAMB and LARS take one), looks at its shape, or at all parameters seen as "
            f"one long vector (LBFGS): {WHOLE}"
        )


def _take(state: State, group: dict[str, Any]) -> _Taken:
    """Put plain parameters in the place of a group's shards."""
    parameters = group["params"]
    given = {id(one): (one, _plain(state, one)) for one in parameters if isinstance(one, FlatShard)}
    group["params"] = [part for one in parameters for part in (given[id(one)][1] if id(one) in given else [one])]
    return _Taken(group, parameters, list(given.values()))


def _plain(state: State, shard: FlatShard) -> list[nn.Parameter]:
    """Return what stands for a shard: a twin, or where its tensors differ a parameter for each; with the state."""
    values, gradient = plain(shard), None if shard.grad is None else plain(shard.grad)
    own = state.get(shard, {})
    own.update({key: plain(value) for key, value in own.items() if isinstance(value, Part)})  # made before any step
    if gradient is None or not (shard.parts.unused or BY_TENSOR in state.get(shard, {})):
        if shard.twin is None:
            shard.twin = nn.Parameter(values, requires_grad=shard.requires_grad)
        shard.twin.grad = gradient
        if shard in state:
            state[shard.twin] = state.pop(shard)
        return [shard.twin]
    kept, made = state.get(shard, {}), []
    moments = {key: value for key, value in kept.items() if _is_like(value, values)}
    numbers = {key: value for key, value in kept.items() if key not in moments and key != BY_TENSOR}
    of_tensor = kept.get(BY_TENSOR, {})
    for piece in shard.parts.pieces:
        one = nn.Parameter(values[_part(piece)])
        one.grad = None if piece.tensor in shard.parts.unused else gradient[_part(piece)]
        counts = of_tensor.get(shard.parts.names[piece.tensor], numbers)
        if kept and counts is not None:
            state[one] = {**{key: value[_part(piece)] for key, value in moments.items()}, **copy.deepcopy(counts)}
        made.append(one)
    return made


def _take_back(state: State, shard: FlatShard, pieces: list[nn.Parameter]) -> None:
    """Collect the states of what stood for a shard in that of the shard."""
    plain(shard)[:0].zero_()  # counts as a change of the shard: units gather it anew
    if pieces and pieces[0] is shard.twin:
        shard.twin.grad = None
        if shard.twin in state:
            state[shard] = state.pop(shard.twin)
        return
    kept: dict[str, Any] = {key: value for key, value in state.get(shard, {}).items() if _is_like(value, shard)}
    of_tensor: dict[str, dict[str, Any] | None] = {}
    for piece, one in zip(shard.parts.pieces, pieces, strict=True):
        own = state.pop(one, {})
        for key, value in own.items():
            if _is_like(value, one):
                whole = kept.setdefault(key, torch.zeros(shard.shape, dtype=value.dtype, device=value.device))
                whole[_part(piece)] = value
        numbers = {key: value for key, value in own.items() if not _is_like(value, one)}
        of_tensor[shard.parts.names[piece.tensor]] = numbers if own else None  # None: never updated
    if any(numbers is not None for numbers in of_tensor.values()):
        state[shard] = {**kept, **of_row(of_tensor)}


def _is_like(value: Any, one: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == one.shape


def _part(piece: Piece) -> slice:
    return slice(piece.offset, piece.offset + piece.stop - piece.start)


def _rank() -> str:
    return f"rank {dist.get_rank() if dist.is_initialized() else 0}"
