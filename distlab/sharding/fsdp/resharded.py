"""What stands in a module for a parameter that was freed, and what happens to code that reads it all the same.

A freed parameter still has its name, shape, type and device: `model.parameters()` inside a model, `model.device` and
counts of parameters are what they are in one process. So it is when it is frozen: `requires_grad_(False)` leaves it out
of the next forward's graph, until `requires_grad_(True)`. To compute with it takes the values, which are there in its
unit's own forward, and in `summon()`. Every other use is refused, with what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from distlab.blocks.modules.moved import NotHere
from distlab.sharding.fsdp.flat_unit import Unit

STATE = (
    "it cannot be pickled or copied: the values are in shards. full_state_dict(model) returns the whole state, "
    "ShardedState(model, optimizer) is the part of a checkpoint; every rank calls them, with the FullyShard model"
)
GRADIENT = (
    "its gradient is in the shard of its unit: model.units[i].shard.grad. Use the FullyShard's own zero_grad(), "
    "synchronize() and clip_gradients_()"
)
CHANGE = "a change of it would be lost; change it inside `with model.summon(write=True) as module:`"
THAW = "it was frozen when FullyShard was built, and no optimizer updates its shard; thaw it before"
AT_WORK = (
    "its unit frees its parameters outside its own forward, and to gather it takes all ranks. Read it in the forward "
    "of its unit, or name other units in units=[...]; look at it, and call methods that read it (generate), inside "
    "`with model.summon() as module:`, on all ranks"
)
INSTEAD = {
    "is_leaf": "an optimizer updates shards: give it model.parameters(), of the FullyShard and not of its module",
    **dict.fromkeys(("detach", "__reduce_ex__", "__deepcopy__"), STATE),
    **dict.fromkeys(("grad", "_grad", "retain_grad", "register_hook", "set grad"), GRADIENT),
    "register_post_accumulate_grad_hook": GRADIENT,
    **dict.fromkeys(("data", "__setitem__", "set data"), CHANGE),
    "requires_grad": THAW,
}


class ReshardedParameter(NotHere):
    """A parameter without memory; see above."""

    unit, trains = "", True

    @staticmethod
    def __new__(cls: type, unit: Unit, tensor: int) -> ReshardedParameter:  # noqa: PYI034
        """Make one that torch takes for a parameter: tensor number so many of a unit."""
        like: dict[str, Any] = {"dtype": unit.compute_dtype, "device": unit.options.device}
        like["requires_grad"] = unit.shard.requires_grad
        one: ReshardedParameter = Tensor._make_wrapper_subclass(cls, unit.layout.shapes[tensor], **like)
        one._is_param = True  # isinstance(one, nn.Parameter)
        one.label, one.unit, one.trains = unit.layout.names[tensor], unit.name or "root", unit.shard.requires_grad
        return one

    @property
    def requires_grad(self) -> bool:
        """Whether the forward passes that come put it into autograd's graph."""
        return self.trains

    @requires_grad.setter
    def requires_grad(self, trains: bool) -> None:
        if trains and not super().requires_grad:
            raise RuntimeError(f"rank {dist.get_rank()}: {self.why('requires_grad')}")
        self.trains = trains

    def requires_grad_(self, requires_grad: bool = True) -> ReshardedParameter:
        """Freeze it, or thaw it again."""
        self.requires_grad = requires_grad
        return self

    def __init__(self, *_: object) -> None:
        """Do nothing more."""

    def why(self, use: str) -> str:
        """Return where the values are, and what to do."""
        other = CHANGE if use.endswith("_") and not use.endswith("__") else AT_WORK
        return f"{self.label} (unit {self.unit!r}) is not here now: {INSTEAD.get(use, other)}"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse what came past `__torch_function__`."""
        raise RuntimeError(f"rank {dist.get_rank()}: {function} reads a parameter that FullyShard has freed")


def names_of_others(module: nn.Module, units: list[Unit], shards: nn.ParameterList) -> Iterator[str]:
    """Name the parameters that are in no unit: added after it was built, or in the place of those that are."""
    for number, (unit, shard) in enumerate(zip(units, shards._parameters.values(), strict=True)):
        if shard is not unit.shard:
            yield f"shards.{number}"
    for path, one in module.named_modules():
        for attribute, parameter in one._parameters.items():
            if parameter is not None and not isinstance(parameter, ReshardedParameter):
                yield f"{path}.{attribute}" if path else attribute


def refuse_others(names: Iterator[str]) -> None:
    """Refuse parameters that are in no unit; a RuntimeError names the first."""
    for name in names:
        raise RuntimeError(
            f"rank {dist.get_rank()}: {name} was added after FullyShard was built, or replaced by a different tensor "
            "(by functional_call, or load_state_dict(assign=True)?). FullyShard computes with its own shards, and "
            "ranks do not average others' gradients. Add it before; change values in place; give a tensor to forward; "
            "or leave its module to no unit: name others in units=[...]"
        )


def refuse_whole_state(model: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Refuse a state without shards in FullyShard.load_state_dict, which torch's strict=False would drop."""
    if not any(name.startswith(f"{prefix}shards.") for name in state):
        raise ValueError(
            f"rank {dist.get_rank()}: this state has no shards, and FullyShard's parameters are shards; call "
            "load_full_state_dict(model, state) on every rank"
        )
