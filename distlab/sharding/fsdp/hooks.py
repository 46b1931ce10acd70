"""What happens around one unit's forward and backward.

    forward     before   gather (it was started one unit ago), start the next; the module gets the whole parameters
                after    free
    backward    before   gather again, start the one before; reached when a gradient of the unit's output exists
                after    free, reduce-scatter; reached when the gradients of all its parameters exist

The two lines of forward are `WatchedModule._before` and `_after`; those of backward are `ForwardCall.begin_backward`
and `_done`. A `ForwardCall` is one run of the unit's forward. A unit may be called several times in a pass, or again
before backward; it stays whole until the last call whose backward has begun is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from distlab.sharding.fsdp.flat_unit import Unit
from distlab.sharding.fsdp.prefetch import Order, SubmoduleUnits

if TYPE_CHECKING:
    from distlab.sharding.fsdp.fully_shard import FullyShard


class FreedParameter:
    """Stands in a module for a parameter that was freed: using it says so, and reads no freed memory."""

    def __init__(self, name: str, unit: str) -> None:
        self.__dict__["_text"] = (
            f"{name} is not here now: its unit {unit or 'root'!r} frees its parameters outside its own forward. Call "
            "the unit's module instead of reading its parameters, name another unit that holds all who read them "
            "(units=[...]), or look at them inside `with model.summon():`"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself asks of any object
            raise AttributeError(name)
        raise RuntimeError(self._text)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tree_flatten((list(args), kwargs or {}))[0]
        raise RuntimeError(next(one._text for one in given if isinstance(one, FreedParameter)))


class ForwardCall:
    """One run of a unit's forward, and what of its backward is still to come."""

    __slots__ = ("ended", "watched", "remaining", "place", "running", "versions")

    def __init__(self, watched: WatchedModule) -> None:
        self.watched = watched
        self.running = False
        self.remaining: set[object] = set()
        self.versions = [unit.shard._version for unit in watched.units]
        self.ended: list[SubmoduleUnits] = []
        self.place = 0

    def begin_backward(self, views: list[tuple[Tensor, ...]]) -> None:
        """Gather the unit: a gradient of its output exists, so its backward begins now."""
        if self.running:
            return
        watched = self.watched
        if self.versions != [unit.shard._version for unit in watched.units]:
            raise RuntimeError(
                f"unit {watched.name or 'root'!r}: its shard was changed between forward and backward, so backward "
                "would use other parameters than forward; update after backward"
            )
        self.running = True
        self.remaining = {unit for unit in watched.units if unit.shard.requires_grad} | (self.remaining & {"inputs"})
        watched.open += 1
        watched.finish_gather()
        watched.show(views)
        for one in Order.before(self.ended, self.place, watched.model.order.prefetch):
            one.start_gather()

    def on_gradients(self, unit: Unit, gradients: Sequence[Tensor | None]) -> None:
        """Reduce a unit's gradients: all of them exist."""
        self._done(unit)
        self.watched.model.take_gradients(unit, gradients)

    def on_inputs(self) -> None:
        """Note that the gradients of the inputs exist."""
        self._done("inputs")

    def _done(self, what: object) -> None:
        """Note that a part of backward is done; free the unit after the last part of the last call."""
        self.remaining.discard(what)
        if self.running and not self.remaining:
            self.running = False
            self.watched.open -= 1
            if self.watched.open == 0:
                self.watched.hide()
                self.watched.free()


class WatchedModule(SubmoduleUnits):
    """A submodule with hooks that keep its parameters whole while it runs, and only then.

    Attributes:
        open: calls whose backward has begun and is not done.
    """

    def __init__(self, name: str, module: nn.Module, units: list[Unit], model: FullyShard) -> None:
        super().__init__(name, units)
        self.module, self.model = module, model
        self.open = 0
        self._calls: list[tuple[ForwardCall, list[tuple[Tensor, ...]]]] = []
        self._freed = [[FreedParameter(name_, unit.name) for name_ in unit.layout.names] for unit in units]
        self.hooks = [
            module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            module.register_forward_hook(self._after),
        ]
        self.hide()

    def show(self, views: Sequence[Sequence[Any]]) -> None:
        """Put tensors where the modules look for their parameters."""
        for unit, tensors in zip(self.units, views, strict=True):
            for place in unit.members.places:
                put(place.module, place.attribute, tensors[place.tensor])

    def hide(self) -> None:
        """Put a `FreedParameter` where the modules look for each parameter."""
        self.show(self._freed)

    def abandon(self) -> None:
        """Free everything, after an error or at the end of a step."""
        self._calls.clear()
        self.open = 0
        self.hide()
        self.free()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        model = self.model
        if model.is_summoned:
            return None
        again = runs_in_backward()
        if self.name == "" and not again:
            model.start_pass()
        ahead = model.order.begin(self) if not again else []
        self.finish_gather()
        for one in ahead:
            one.start_gather()
        call = ForwardCall(self)
        views = [unit.views(call.on_gradients) for unit in self.units]
        self._calls.append((call, views))
        self.show(views)
        if model.precision is not None:
            dtype = self.units[0].compute_dtype if self.units else None
            args, kwargs = _cast((args, kwargs), dtype)
        if torch.is_grad_enabled() and any(not unit.shard.requires_grad for unit in self.units):
            args, kwargs = self._watch_inputs(call, args, kwargs)
        return args, kwargs

    def _watch_inputs(self, call: ForwardCall, args: Any, kwargs: Any) -> Any:
        """Learn when backward has passed the inputs: frozen parameters are needed until then, and get no gradient."""
        found = [one for one in tree_flatten((args, kwargs))[0] if _wants_gradient(one)]
        if not found:
            return args, kwargs
        call.remaining.add("inputs")
        watched = dict(zip(map(id, found), _Inputs.apply(call, *found), strict=True))  # type: ignore[no-untyped-call]
        return tree_map(lambda one: watched.get(id(one), one), (args, kwargs))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        model = self.model
        if model.is_summoned:
            return
        call, views = self._calls.pop()
        leaves = tree_flatten(output)[0]
        if torch.is_grad_enabled():
            self._watch_outputs(call, views, leaves)
        if runs_in_backward():  # a forward that is run again for its backward, which comes now
            return
        call.ended, call.place = model.order.ended, model.order.end(self)
        if not self._calls:
            self.hide()
            if not torch.is_grad_enabled() or any(unit.reshard_after_forward for unit in self.units):
                self.free()
        if self.name == "":
            model.end_pass()

    def _watch_outputs(self, call: ForwardCall, views: list[tuple[Tensor, ...]], leaves: list[Any]) -> None:
        strange = [type(one).__name__ for one in leaves if not isinstance(one, (Tensor, int, float, str, type(None)))]
        if strange:
            raise RuntimeError(
                f"unit {self.name or 'root'!r} returned a {strange[0]}, in which tensors cannot be seen, so backward "
                "could not gather the unit; return tensors in tuples, lists, dicts or named tuples"
            )
        for one in leaves:
            if _wants_gradient(one):
                one.register_hook(lambda _: call.begin_backward(views))


class _Inputs(torch.autograd.Function):
    """Return the inputs unchanged, and say when backward has computed their gradients."""

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(one.view_as(one) for one in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.call.on_inputs()
        return None, *gradients


def put(module: nn.Module, attribute: str, value: object) -> None:
    """Put a plain tensor, or something else that is not a parameter, where a module looks for its parameter."""
    if isinstance(module, nn.RNNBase) and isinstance(value, Tensor):
        setattr(module, attribute, value)  # it also keeps a list of its weights
    else:
        module.__dict__[attribute] = value


def runs_in_backward() -> bool:
    """Return whether autograd's backward is running now, and what runs here runs in it."""
    return bool(torch._C._current_graph_task_id() != -1)


def _wants_gradient(one: Any) -> bool:
    return isinstance(one, Tensor) and one.requires_grad


def _cast(inputs: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return inputs
    return tree_map(lambda one: one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one, inputs)
