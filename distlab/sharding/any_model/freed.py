"""What stands in a module for a parameter that was freed, and what happens to code that reads it all the same.

A freed parameter still has its name, shape, type and device: `model.parameters()` inside a model, `model.device` and
counts of parameters are what they are in one process. To compute with it takes the values, so the unit is gathered:
such a use is a small forward of the unit, and its backward gathers it again. All ranks must do it. So it is open while
the model's forward runs, which all ranks call, and refused outside of it.

What would silently do nothing is refused: an optimizer of freed parameters, their gradients, changes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from distlab.modules.moved import KNOWN, name_of
from distlab.sharding.fsdp.flat_unit import Unit

STATE = (
    "the values are in shards. full_state_dict(model) returns the whole state, ShardedState(model, optimizer) is the "
    "part of a checkpoint; every rank calls them, with the FullyShard model"
)
GRADIENT = (
    "its gradient is in the shard of its unit: model.units[i].shard.grad. Use the FullyShard's own zero_grad(), "
    "synchronize() and clip_gradients_()"
)
CHANGE = "a change of it would be lost; change it inside `with model.summon(write=True) as module:`"
FREEZE = "freeze parameters before FullyShard is built: frozen ones have a shard of their own"
INSTEAD = {
    "is_leaf": "an optimizer updates shards: give it model.parameters(), of the FullyShard and not of its module",
    "detach": STATE,
    "__reduce_ex__": STATE,
    "__deepcopy__": STATE,
    "grad": GRADIENT,
    "_grad": GRADIENT,
    "retain_grad": GRADIENT,
    "register_hook": GRADIENT,
    "register_post_accumulate_grad_hook": GRADIENT,
    "data": CHANGE,
    "__setitem__": CHANGE,
    "set data": CHANGE,
    "set grad": GRADIENT,
    "set requires_grad": FREEZE,
    "requires_grad_": FREEZE,
}
IN_FORWARD = ("detach", "is_leaf")  # these are harmless where the unit is gathered for them


class Lender(Protocol):
    """The submodule of a unit, which makes it whole for code that reads a parameter."""

    model: Any

    def begin_call(self, *, reads: bool = False) -> Any:
        """Make the unit whole."""

    def end_call(self, running: Any, output: Any) -> Any:
        """Return the output, after which backward gathers the unit."""


class FreedParameter(Tensor):
    """A parameter without memory; see above.

    Attributes:
        watched: the submodule whose unit it belongs to.
        place: the numbers of its unit there and of its tensor in the unit.
    """

    watched: Lender
    place: tuple[int, int]
    label: str

    @staticmethod
    def __new__(cls: type, unit: Unit, watched: Lender, place: tuple[int, int]) -> FreedParameter:  # noqa: PYI034
        """Make one that torch takes for a parameter."""
        one: FreedParameter = Tensor._make_wrapper_subclass(
            cls,
            unit.layout.shapes[place[1]],
            dtype=unit.compute_dtype,
            device=unit.options.device,
            requires_grad=unit.shard.requires_grad,
        )
        one._is_param = True  # isinstance(one, nn.Parameter)
        one.watched, one.place = watched, place
        one.label = f"{unit.layout.names[place[1]]} (unit {unit.name or 'root'!r})"
        return one

    def __init__(self, *_: object) -> None:
        """Do nothing more."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Say what is known."""
        return f"FreedParameter({self.label}, shape {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what is known without the values; gather for the rest, or refuse."""
        name = name_of(function)
        if name in KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        changed = _freed_in([*args[:1], kwargs.get("out")])
        if changed:
            _refuse(name, changed[0])
        return _use(function, args, kwargs, _freed_in((list(args), kwargs)))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse what came past `__torch_function__`."""
        raise RuntimeError(_not_here(_freed_in((list(args), kwargs))[0]))


def _freed_in(values: Any) -> list[FreedParameter]:
    return [one for one in tree_leaves(values) if isinstance(one, FreedParameter)]


def _not_here(one: FreedParameter) -> str:
    return (
        f"{one.label} is not here now: its unit frees its parameters outside its own forward, and to gather it takes "
        "all ranks. Read it in the model's forward; or look at it, and call methods that read it (generate), "
        "inside `with model.summon() as module:`, on all ranks"
    )


def _refuse(name: str, one: FreedParameter) -> None:
    """Refuse what a copy of the values would silently get wrong.

    Raises:
        RuntimeError: the text says what to do instead.
    """
    changes = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    text = INSTEAD.get(name, CHANGE if changes else None)
    if text is not None and not (name in IN_FORWARD and one.watched.model.running):
        raise RuntimeError(f"{one.label} is not here, {text}")


_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
_IN_PLACE = {f"__i{name}__" for name in _OPERATORS.split(" ")}


def _use(function: Callable[..., Any], args: Any, kwargs: Any, freed: list[FreedParameter]) -> Any:
    """Call a function with the whole parameters: a small forward of their units."""
    model = freed[0].watched.model
    if not model.running:
        raise RuntimeError(_not_here(freed[0]))
    lenders = list(dict.fromkeys(one.watched for one in freed))
    model.lend(lenders)
    calls = {lender: lender.begin_call(reads=True) for lender in lenders}

    def whole(one: Any) -> Any:
        if not isinstance(one, FreedParameter):
            return one
        unit, tensor = one.place
        return calls[one.watched].views[unit][tensor]

    args, kwargs = tree_map(whole, (args, kwargs))
    output = function(*args, **kwargs)
    for lender, running in calls.items():
        output = lender.end_call(running, output)
    return output


class RefusesCopies:
    """While it is there, a module is not pickled or copied: a file or a copy would have no values.

    Args:
        module: of a unit.
        name: of the unit.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        vars(module)["__reduce_ex__"] = self._refuse  # pickle and copy ask the object for it, before its class

    def _refuse(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            f"rank {dist.get_rank()}: {type(self._module).__name__} (unit {self._name or 'root'!r}) cannot be pickled "
            f"or copied: {STATE}"
        )

    def remove(self) -> None:
        """Let the module be copied again."""
        vars(self._module).pop("__reduce_ex__", None)


def check_nothing_added(module: nn.Module, units: Sequence[Unit], shards: nn.ParameterList) -> None:
    """Refuse parameters that a module got after it was sharded, and other tensors in the place of shards.

    Raises:
        RuntimeError: there is one; the text names it.
    """
    for unit, shard in zip(units, shards._parameters.values(), strict=True):
        if shard is not unit.shard:
            raise RuntimeError(
                f"rank {dist.get_rank()}: the shard of unit {unit.name or 'root'!r} was replaced by another tensor (by "
                "functional_call, or load_state_dict(assign=True)?), and units compute with their own. Change its "
                "values in place; or build FullyShard of a module that computes with changed parameters"
            )
    for path, one in module.named_modules():
        for attribute, parameter in one._parameters.items():
            if parameter is not None and not isinstance(parameter, FreedParameter):
                raise RuntimeError(
                    f"rank {dist.get_rank()}: {f'{path}.' if path else ''}{attribute} was added after FullyShard was "
                    "built, so it is in no shard and ranks do not average its gradient; add it before, or build "
                    "another FullyShard"
                )


def refuse_whole_state(model: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Refuse a state without shards in FullyShard.load_state_dict: torch would name keys that no state has.

    Raises:
        ValueError: the text names the call that takes it.
    """
    if not any(name.startswith(f"{prefix}shards.") for name in state):
        raise ValueError(
            f"rank {dist.get_rank()}: this state has no shards, and FullyShard's parameters are shards. "
            "For the state of the whole module call load_full_state_dict(model, state), and for its optimizer "
            "load_full_optimizer_state(model, optimizer, state), on every rank"
        )
