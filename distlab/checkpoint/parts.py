"""The parts of a run: what each gives to a checkpoint, and how it takes it back.

There are two kinds of state. What all ranks share (weights, the optimizer's moments) is written once, by rank 0. Each
rank writes its own: generators of random numbers, the buffers of modules (running statistics of the samples that this
rank saw), what a GradientHook remembers (the error memory of a compressor: what this rank did *not* send), and the
shard of a sharded model. Saved from rank 0 alone, these would come back as rank 0's on every rank, without any error.
A sharded part can do more: shards of other ranks, cut anew, serve another number of ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import nn

from distlab.gradient_hook import GradientHook
from distlab.rng import random_state, restore_random_state

_PLAIN = {bool, int, float, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device, type(None), nn.Parameter}


class Stateful(Protocol):
    """A module, an optimizer, a learning-rate schedule: what gives and takes its state as a dictionary."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state back."""


@runtime_checkable
class Sharded(Protocol):
    """A part of which each rank holds a shard: a sharded model with its optimizer.

    A checkpoint gives it back the shards that were saved: of this rank alone, or of all ranks when there are more or
    fewer of them now. None of the three may speak to other ranks.
    """

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's shard: plain values, and tensors that may be the part's own."""

    def check_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError where these saved shards do not fit; change nothing."""

    def load_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up this rank's shard of these."""


Parts = Mapping[str, Stateful | torch.Generator | Sharded]


def is_own(part: Stateful | torch.Generator | Sharded) -> bool:
    """Return whether every rank has a state of its own of this part."""
    return isinstance(part, torch.Generator | Sharded) or is_hook(part)


def is_hook(part: object) -> TypeGuard[GradientHook]:
    """Return whether a part is a GradientHook, and not a module that happens to have a `start`."""
    return isinstance(part, GradientHook) and not isinstance(part, nn.Module | torch.optim.Optimizer)


def shared_state(parts: Parts) -> dict[str, Any]:
    """Return what rank 0 writes for all."""
    return {
        name: part.state_dict()
        for name, part in parts.items()
        if not isinstance(part, torch.Generator | Sharded) and not is_hook(part)
    }


def own_state(parts: Parts) -> dict[str, Any]:
    """Return what this rank must write for itself."""
    return {
        "random": random_state(),
        "generators": {name: p.get_state() for name, p in parts.items() if isinstance(p, torch.Generator)},
        "hooks": {name: p.state_dict() for name, p in parts.items() if is_hook(p)},
        "shards": {name: p.shard_state() for name, p in parts.items() if isinstance(p, Sharded)},
        "buffers": {name: _saved_buffers(p) for name, p in parts.items() if isinstance(p, nn.Module)},
    }


def _saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict()
    return {name: state[name] for name, _ in module.named_buffers() if name in state}


def collect(parts: Parts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what rank 0 writes for all, and what this rank must write for itself.

    Raises:
        ValueError: something in it could be saved but not loaded: loading takes plain values and tensors, and never
            runs code.
    """
    for name, part in parts.items():
        if not is_own(part):
            _refuse_shards(part, name)
    shared, own = shared_state(parts), own_state(parts)
    for name, state in {**shared, **own["hooks"], **own["shards"]}.items():
        require_plain(state, name)
    return shared, own


def _refuse_shards(part: object, name: str) -> None:
    """Refuse a plain part that holds shards: rank 0's would come back on every rank."""
    parameters: list[Any] = []
    if isinstance(part, nn.Module):
        parameters = [*part.parameters()]
    elif isinstance(part, torch.optim.Optimizer):
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
    if any(getattr(parameter, "is_shard", False) for parameter in parameters):
        raise ValueError(
            f"{name} holds shards, of which each rank has its own; pass model and optimizer as one part that saves "
            "them: ShardedState(model, optimizer)"
        )


def require_plain(value: Any, where: str) -> None:
    """Refuse what only code could rebuild."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            if type(key) not in _PLAIN:
                require_plain(key, f"a key of {where}")
            if type(item) not in _PLAIN:
                require_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            if type(item) not in _PLAIN:
                require_plain(item, f"{where}[{index}]")
    elif type(value) not in _PLAIN:
        raise ValueError(
            f"{where} is a {type(value).__name__}; a checkpoint holds numbers, strings, tensors, and lists and "
            "dictionaries of them: convert it in the part's state_dict()"
        )


def check_fit(parts: Parts, shared: dict[str, Any], owns: Sequence[dict[str, Any]]) -> None:
    """Refuse parts that are not those that were saved, before any of them is changed.

    Args:
        parts: of this run.
        shared: what rank 0 wrote for all.
        owns: what ranks wrote for themselves: this rank alone, all that saved, or none where no part needs it.
    """
    saved = set(shared["parts"])
    for kind in ("generators", "hooks", "shards"):
        saved |= {*owns[0].get(kind, {})} if owns else set()
    if not owns:
        saved |= {name for name, part in parts.items() if is_own(part)}
    if saved != set(parts):
        raise ValueError(
            f"the checkpoint has parts {sorted(saved)}; got {sorted(parts)}; pass the parts that were saved"
        )
    for name, part in parts.items():
        if owns and isinstance(part, Sharded) != (name in owns[0].get("shards", {})):
            here, there = ("sharded", "whole") if isinstance(part, Sharded) else ("whole", "sharded")
            raise ValueError(
                f"{name} is {here} here and {there} in the checkpoint; build it as it was when it was saved"
            )
        if isinstance(part, Sharded):
            part.check_shards([own["shards"][name] for own in owns])
        elif isinstance(part, nn.Module):
            now = {key: _shape(value) for key, value in part.state_dict().items()}
            then = {key: _shape(value) for key, value in shared["parts"][name].items()}
            for key in [*then, *now]:
                if now.get(key) != then.get(key):
                    there, here = then.get(key, "nothing"), now.get(key, "nothing")
                    raise ValueError(
                        f"{name}: {key} is {there} in the checkpoint and {here} in the model; build the same model"
                    )
        elif isinstance(part, torch.optim.Optimizer):
            now_sizes = [len(group["params"]) for group in part.param_groups]
            then_sizes = [len(group["params"]) for group in shared["parts"][name]["param_groups"]]
            if now_sizes != then_sizes:
                raise ValueError(
                    f"{name}: groups of {then_sizes} parameters in the checkpoint, of {now_sizes} here; build the same "
                    "optimizer"
                )


def _shape(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


@torch.no_grad()
def take_up(
    parts: Parts, shared: dict[str, Any], owns: Sequence[dict[str, Any]], *, own: dict[str, Any] | None = None
) -> None:
    """Give every part its state; without `own`, which is this rank's of `owns`, all but what is a rank's own."""
    for name, part in parts.items():
        if isinstance(part, Sharded):
            part.load_shards([one["shards"][name] for one in owns])
        elif isinstance(part, torch.Generator):
            if own is not None:
                part.set_state(own["generators"][name])
        elif is_hook(part):
            if own is not None:
                part.load_state_dict(own["hooks"][name])
        else:
            part.load_state_dict(shared["parts"][name])
            if own is not None and isinstance(part, nn.Module):
                for key, buffer in _saved_buffers(part).items():
                    buffer.copy_(own["buffers"][name][key])
    if own is not None:
        restore_random_state(own["random"])
