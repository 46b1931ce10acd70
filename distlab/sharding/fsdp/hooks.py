"""What happens around one unit's forward and backward.

    forward     before   gather (it was started one unit ago), start the next; the module gets the whole parameters
                after    free
    backward    before   gather again, start the one before; reached when a gradient of the unit's output exists
                after    reduce-scatter; reached when the gradients of all its parameters exist; free when the next
                         unit's backward begins (`FullyShard.free_finished`)

The two lines of forward are `WatchedModule._before` and `_after`; those of backward are `ForwardCall.begin_backward`
and `_done`. A `ForwardCall` is one run of the unit's forward. A unit may be called several times in a pass, or again
before backward; it stays whole until the last call whose backward has begun is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from distlab.blocks.modules.moved import NotHere
from distlab.blocks.modules.structures import EMPTY, find, replace
from distlab.sharding.fsdp.flat_unit import Unit
from distlab.sharding.fsdp.resharded import ReshardedParameter, refuse_others

Views = list[tuple[Tensor, ...]]


class ForwardCall:
    """One run of a unit's forward, and what of its backward is still to come."""

    __slots__ = ("ended", "watched", "outer", "remaining", "place", "running", "versions", "task")

    def __init__(self, watched: WatchedModule, outer: Running | None) -> None:
        self.watched, self.outer = watched, outer
        self.running = False
        self.task = -1  # the backward pass in which it ran last
        self.remaining: set[object] = set()
        self.versions = [unit.shard._version for unit in watched.units]
        self.ended: list[WatchedModule] = []
        self.place = 0

    def begin_backward(self, views: Views) -> None:
        """Gather the unit: a gradient of its output exists, so its backward begins now."""
        task = torch._C._current_graph_task_id()
        if self.task == task:
            return
        watched = self.watched
        watched.model.order.begin_backward()
        if self.versions != [unit.shard._version for unit in watched.units]:
            raise RuntimeError(
                f"unit {watched.name or 'root'!r}: its shard was changed between forward and backward, so backward "
                "would use other parameters than forward; update after backward"
            )
        is_new = not self.running  # else a backward inside forward (a gradient of a gradient) has begun it
        self.running, self.task = True, task
        if self.outer is not None:  # a loss of what an inner unit made may reach the outer one through no other tensor
            self.outer.call.begin_backward(self.outer.views)
        if is_new:
            trained = {unit for unit in watched.units if unit.shard.requires_grad}
            self.remaining = trained | (self.remaining & {"inputs"})
            watched.open += 1
        watched.model.free_finished()
        watched.finish_gather()
        watched.show(views)
        first = max(0, self.place - watched.model.order.prefetch)
        for one in reversed(self.ended[first : self.place]):  # the nearest first
            one.start_gather()

    def on_gradients(self, unit: Unit, gradients: Sequence[Tensor | None]) -> None:
        """Reduce a unit's gradients: all of them exist."""
        self._done(unit)
        self.watched.model.take_gradients(unit, gradients)

    def _done(self, what: object) -> None:
        """Note that a part of backward is done; after the last part of the last call the unit may be freed."""
        self.remaining.discard(what)
        if self.running and not self.remaining:
            self.running = False
            self.watched.open -= 1
            if self.watched.open == 0:
                self.watched.hide()
                self.watched.model.finished.append(self.watched)


class Running(NamedTuple):
    """A call that runs, the whole parameters that it uses, and when it began: their versions, the next graph node."""

    call: ForwardCall
    views: Views
    versions: list[int]
    first: int


class WatchedModule:
    """The hooks of one submodule that is a unit, or of the root.

    Attributes:
        name: of the submodule; "" is the root.
        units: gathered and freed together: one, and one more where parameters are frozen.
        module: itself.
        model: the `FullyShard` that it is a part of.
        calls: those whose forward runs, the innermost last.
        open: calls whose backward has begun and is not done.
        stays: backward may begin where no hook sees it, so the units are freed only after the step.
    """

    def __init__(self, name: str, module: nn.Module, units: list[Unit], model: Any) -> None:
        self.name, self.units, self.module, self.model = name, units, module, model
        self.open = 0
        self.stays = False
        self.calls: list[Running] = []
        self._resharded = [[ReshardedParameter(unit, at) for at in range(len(unit.layout.names))] for unit in units]
        why = "FullyShard gathers and frees parameters, which no compiled graph can do"
        before, after = (torch.compiler.disable(one, reason=why) for one in (self._before, self._after))
        self.hooks: list[Any] = [module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)]
        self.hooks.append(module.register_forward_hook(after, with_kwargs=True))
        self.hide()

    def start_gather(self) -> None:
        """Begin to make the units whole; do not wait."""
        for unit in self.units:
            unit.start_gather()

    def finish_gather(self) -> None:
        """Make the units whole."""
        self.start_gather()
        for unit in self.units:
            unit.finish_gather()

    def free(self) -> None:
        """Free the whole parameters of the units."""
        for unit in self.units:
            unit.free()

    def show(self, views: Sequence[Sequence[Any]]) -> None:
        """Put tensors where the modules look for their parameters; those of frozen ones leave the graph."""
        for unit, tensors, resharded in zip(self.units, views, self._resharded, strict=True):
            for place in unit.members.places:
                one, trains = tensors[place.tensor], resharded[place.tensor].trains
                put(place.module, place.attribute, one if trains or not one.requires_grad else one.detach())

    def hide(self) -> None:
        """Put a `ReshardedParameter` where the modules look for each parameter."""
        self.show(self._resharded)

    def settle(self) -> None:
        """Free the units after a forward, unless a different call of them runs or they are to stay."""
        if self.calls or self.stays or runs_in_backward():
            return
        self.hide()
        if not torch.is_grad_enabled() or any(unit.reshard_after_forward for unit in self.units):
            self.free()

    def abandon(self) -> None:
        """Free everything, after an error or at the end of a step."""
        self.calls.clear()
        self.open = 0
        self.stays = False
        self.hide()
        self.free()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        model = self.model
        if model.is_summoned:
            return None
        running = self._begin() if module is self.module else None  # a copy of the module has parameters of its own
        if model.precision is not None and self.units:
            dtype = self.units[0].compute_dtype
            args, kwargs = replace(
                (args, kwargs),
                lambda one: one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one,
            )
        frozen = [unit for unit in self.units if not unit.shard.requires_grad]
        if running is not None and frozen and torch.is_grad_enabled():
            is_watched = watch_inputs(partial(running.call._done, "inputs"), (args, kwargs))
            running.call.remaining |= {"inputs"} if is_watched else set()
        return args, kwargs

    def _begin(self) -> Running:
        """Make the units whole for a call, and begin to gather those that come next."""
        model = self.model
        if self.name == "" and not self.calls and not runs_in_backward():
            model.start_pass()
        self._check_place()
        ahead = [] if runs_in_backward() else model.order.begin(self)
        self.finish_gather()
        for one in ahead:
            one.start_gather()
        call = ForwardCall(self, model.running[-1] if model.running else None)
        views = [unit.views(call.on_gradients) for unit in self.units]
        model.order.note_graph(self.units, views)
        versions = [sum(one._version for one in tensors) for tensors in views]
        running = Running(call, views, versions, torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self.calls.append(running)
        model.running.append(running)
        self.show(views)
        return running

    def _check_place(self) -> None:
        """Refuse, by a RuntimeError, a call in a transform of torch.func, in a second thread, or by functional_call."""
        inside, thread = torch._C._functorch.peek_interpreter_stack() is not None, self.model.order.thread
        if inside or thread not in (None, threading.get_ident()):
            func, other = "a transform of torch.func (vmap, grad, jvp, ...)", "a different thread than its model"
            where = func if inside else other
            raise RuntimeError(
                f"unit {self.name or 'root'!r} is called in {where}, where it cannot be gathered in the order of all "
                "ranks. Name other units in units=[...], such as the module that does so and not this part of it"
            )
        if not (self.calls or self.open or self.stays):
            refuse_others(
                unit.layout.names[place.tensor]
                for unit in self.units
                for place in unit.members.places
                if not isinstance(place.module._parameters.get(place.attribute), ReshardedParameter)
            )

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Free the units, and see where backward will need them."""
        model = self.model
        if model.is_summoned or module is not self.module:
            return
        running = self.calls.pop()
        model.running.remove(running)
        self._watch(running, *made_by(output, args, kwargs))
        if runs_in_backward():  # a forward that is run again for its backward, which comes now
            return
        running.call.ended, running.call.place = model.order.end(self)
        self.settle()
        if self.name == "" and not self.calls:
            model.end_pass()

    def _watch(self, running: Running, made: Sequence[Tensor], is_hidden: bool) -> None:
        """Let gradients of what a call made gather the unit; a RuntimeError: it changed a parameter, or returns one."""
        unit = f"unit {self.name or 'root'!r}"
        if running.versions != [sum(one._version for one in tensors) for tensors in running.views]:
            raise RuntimeError(
                f"{unit}: its forward changed a parameter in place (an Embedding with max_norm does). The change would "
                "be lost when the unit is freed; compute with a changed copy instead"
            )
        buffers = {one.buffer.untyped_storage()._cdata for one in self.units}
        if any(torch._C._has_storage(one) and one.untyped_storage()._cdata in buffers for one in made):
            raise RuntimeError(
                f"{unit} returns a parameter, or a part of one, and its memory is freed now; return a copy: "
                "parameter.clone()"
            )
        if torch.is_grad_enabled():
            hooked = [one for one in made if one.requires_grad and not one.is_leaf]
            for one in hooked:
                one.register_hook(lambda _: running.call.begin_backward(running.views))
            nodes = [one.grad_fn._sequence_nr() for one in hooked if one.grad_fn is not None]
            end = 1 + max([running.first - 1, *nodes])
            # It computed on, after its output: that may be kept elsewhere, in an attribute.
            self.stays |= is_hidden or end < torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def put(module: nn.Module, attribute: str, value: Any) -> None:
    """Put a tensor where a module looks for its parameter, which need not be a parameter for torch."""
    module._parameters[attribute] = value
    if isinstance(module, nn.RNNBase) and attribute in module._flat_weights_names:
        module._flat_weights[module._flat_weights_names.index(attribute)] = value


def runs_in_backward() -> bool:
    """Return whether autograd's backward is running now, and what runs here runs in it."""
    return bool(torch._C._current_graph_task_id() != -1)


def made_by(output: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], bool]:
    """Return the tensors in what a forward returns, or has left in its inputs' containers (a cache, a list of states).

    Returns:
        The tensors, with those that they are views of, and whether some may be hidden.
    """
    found, is_hidden = find(output)
    holders = [one for one in (*args, *kwargs.values()) if not isinstance(one, (Tensor, *EMPTY))]
    made = [one for one in (*found, *(find(holders)[0] if holders else ())) if not isinstance(one, NotHere)]
    return [*made, *(one._base for one in made if one._base is not None)], is_hidden


def watch_inputs(on_passed: Callable[[], None], inputs: tuple[Any, Any]) -> bool:
    """Call a function once backward has computed the gradients of all inputs; return False where none wants one.

    Hooks on the tensors themselves: a copy could not be changed in place, as many models do with their inputs.
    """
    found = [one for one in find(inputs)[0] if one.requires_grad and not isinstance(one, NotHere)]
    if not found:
        return False

    def passed(gradients: Any) -> None:
        handle.remove()  # an input may be a leaf, which lives on and would keep the hooks of all steps
        on_passed()

    handle = register_multi_grad_hook(found, passed)
    return True
