"""The parts of a run: what each gives to a checkpoint, and how it takes it back.

There are two kinds of state. What all ranks share (weights, the optimizer's moments) is written once, by rank 0. Each
rank writes its own: generators of random numbers, the buffers of modules (running statistics of the samples that this
rank saw), what a GradientHook remembers (the error memory of a compressor: what this rank did *not* send), and the
shard of a sharded model. Saved from rank 0 alone, these would come back as rank 0's on every rank, without any error.
A sharded part can do more: shards of other ranks, cut anew, serve a different number of ranks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import nn

from distlab.blocks.gradient_hook import GradientHook
from distlab.blocks.replicate import bit_sum, every_parameter
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


def _is_hook(part: object) -> TypeGuard[GradientHook]:
    """Return whether a part is a GradientHook, and not a module that happens to have a `start`."""
    return isinstance(part, GradientHook) and not isinstance(part, nn.Module | torch.optim.Optimizer)


def shared_state(parts: Parts) -> dict[str, Any]:
    """Return what rank 0 writes for all."""
    return {
        name: part.state_dict()
        for name, part in parts.items()
        if not isinstance(part, torch.Generator | Sharded) and not _is_hook(part)
    }


def own_state(parts: Parts) -> dict[str, Any]:
    """Return what this rank must write for itself."""
    return {
        "random": random_state(),
        "generators": {name: p.get_state() for name, p in parts.items() if isinstance(p, torch.Generator)},
        "hooks": {name: p.state_dict() for name, p in parts.items() if _is_hook(p)},
        "shards": {name: p.shard_state() for name, p in parts.items() if isinstance(p, Sharded)},
        "buffers": {name: _saved_buffers(p) for name, p in parts.items() if isinstance(p, nn.Module)},
    }


def _saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict()
    return {name: state[name] for name, _ in module.named_buffers() if name in state}


def sums_of(parts: Parts) -> dict[str, tuple[str, int]]:
    """Return shape and sum of bits of each parameter of which rank 0 writes its own for all, by part and name."""
    modules = {name: one for name, one in parts.items() if isinstance(one, nn.Module) and not isinstance(one, Sharded)}
    named = {f"{name}: {key}": one for name, part in modules.items() for key, one in every_parameter(part)}
    sums = [bit_sum(one) for one in named.values()]
    places = {one.device for one in sums}  # one wait for each device
    added = {place: iter(torch.stack([s for s in sums if s.device == place]).tolist()) for place in places}
    return {name: (_shape(one), next(added[one.device])) for name, one in named.items()}


def moments_of(parts: Parts) -> dict[str, torch.Tensor]:
    """Return the tensors of plain optimizers' states, by words that name them: `exp_avg of optimizer's parameter 3`."""
    return {
        f"{key} of {name}'s parameter {index}": value
        for name, part in parts.items()
        if isinstance(part, torch.optim.Optimizer)
        for index, kept in part.state_dict()["state"].items()
        for key, value in kept.items()
        if isinstance(value, torch.Tensor)
    }


def require_equal(everyone: Sequence[Mapping[str, tuple[str, int]]]) -> None:
    """Refuse, by one ValueError on all ranks, modules whose parameters differ between ranks: others' would be lost."""
    first = everyone[0]
    names = dict.fromkeys(name for sums in everyone for name in sums)
    wrong = [name for name in names if any(sums.get(name) != first.get(name) for sums in everyone)]
    if not wrong:
        return
    ranks = [rank for rank, sums in enumerate(everyone) if any(sums.get(name) != first.get(name) for name in wrong)]
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    who = f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {ranks} differ"
    raise ValueError(
        f"parameters differ between ranks ({who} from rank 0): {', '.join(wrong[:3])}{more}; a checkpoint would give "
        "rank 0's to all. If layers are cut over ranks (tensor, expert, pipeline parallel): pass a Hybrid, or of a "
        "pipeline a StageState. If ranks are replicas: they drifted apart or began unequal; give all one rank's values "
        "(DataParallel does), or go back to a checkpoint"
    )


def refuse_shards(parts: Parts) -> None:
    """Refuse, by a ValueError, plain parts that hold shards: rank 0's would come back on every rank."""
    for name, part in parts.items():
        held = [*part.parameters()] if isinstance(part, nn.Module) and not isinstance(part, Sharded) else []
        if isinstance(part, torch.optim.Optimizer):
            held = [parameter for group in part.param_groups for parameter in group["params"]]
        if any(getattr(parameter, "is_shard", False) for parameter in held):
            raise ValueError(
                f"{name} holds shards, of which each rank has its own; pass model and optimizer as one part that saves "
                "them: ShardedState(model, optimizer)"
            )


def require_plain(value: Any, where: str = "") -> None:
    """Refuse what could be saved but not loaded: loading takes plain values and tensors, and never runs code."""
    if type(value) in (dict, OrderedDict, Counter):  # a MultiStepLR counts
        for key, item in value.items():
            require_plain(key, f"a key of {where}")
            require_plain(item, f"{where}[{key!r}]" if where else str(key))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
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
    own = {name for kind in ("generators", "hooks", "shards") for name in (owns[0] if owns else {}).get(kind, ())}
    if not owns:
        own = {name for name, part in parts.items() if isinstance(part, torch.Generator) or _is_hook(part)}
    if (saved := {*shared["parts"], *own}) != {*parts}:
        raise ValueError(
            f"the checkpoint has parts {sorted(saved)}; got {sorted(parts)}; pass the parts that were saved"
        )
    for name, part in parts.items():
        here = _saver(part.shard_state() if isinstance(part, Sharded) else None)
        there = _saver(owns[0]["shards"].get(name) if owns else None)
        if here != there:
            raise ValueError(f"{name} is {here} here, but the checkpoint saved it as {there}; pass {there}")
        if isinstance(part, Sharded):
            part.check_shards([own["shards"][name] for own in owns])
        elif isinstance(part, nn.Module):
            _check_module(part, name, shared["parts"][name])
        elif isinstance(part, torch.optim.Optimizer):
            _check_optimizer(part, name, shared["kinds"][name], shared["parts"][name])


def _check_module(module: nn.Module, name: str, state: Mapping[str, Any]) -> None:
    now, then = ({key: _shape(value) for key, value in one.items()} for one in (module.state_dict(), state))
    for key in [*then, *now]:
        if now.get(key) != then.get(key):
            raise ValueError(
                f"{name}: {key} is {then.get(key, 'nothing')} in the checkpoint and {now.get(key, 'nothing')} in the "
                "model; build the same model"
            )


def _check_optimizer(optimizer: torch.optim.Optimizer, name: str, kind: str, state: Mapping[str, Any]) -> None:
    now, then = (
        f"{its} with groups of {[len(one['params']) for one in groups]} parameters"
        for its, groups in ((type(optimizer).__name__, optimizer.param_groups), (kind, state["param_groups"]))
    )
    if now != then:
        raise ValueError(
            f"{name} is {then} in the checkpoint and {now} here; build the same optimizer: one kind of moments means "
            "nothing to a different one"
        )


def _saver(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return "a whole part"
    kinds = {"place": "a Hybrid", "stages": "a StageState"}
    return next((kind for key, kind in kinds.items() if key in state), "a ShardedState or ShardedOptimizer")


def _shape(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


@torch.no_grad()
def take_up(
    parts: Parts, shared: dict[str, Any], owns: Sequence[dict[str, Any]], *, own: dict[str, Any] | None = None
) -> None:
    """Load every part's state. `own`: this rank's entry of `owns`; None: generators and hooks stay as they are."""
    for name, part in parts.items():
        if isinstance(part, Sharded):
            part.load_shards([one["shards"][name] for one in owns])
        elif isinstance(part, torch.Generator):
            if own is not None:
                part.set_state(own["generators"][name])
        elif _is_hook(part):
            if own is not None:
                part.load_state_dict(own["hooks"][name])
        else:
            part.load_state_dict(shared["parts"][name])
            if own is not None and isinstance(part, nn.Module):
                for key, buffer in _saved_buffers(part).items():
                    buffer.copy_(own["buffers"][name][key])
    if own is not None:
        restore_random_state(own["random"])
