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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.modules.structures import find, replace
from distlab.sharding.any_model.checks import check_place
from distlab.sharding.any_model.freed import FreedParameter, RefusesCopies
from distlab.sharding.any_model.inputs import cast_inputs, kept_in, watch_inputs
from distlab.sharding.fsdp.flat_unit import Unit
from distlab.sharding.fsdp.prefetch import Order, ShardedModel, SubmoduleUnits

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
        self.ended: list[SubmoduleUnits] = []
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
        """Note that a part of backward is done; after the last part of the last call the unit may be freed."""
        self.remaining.discard(what)
        if self.running and not self.remaining:
            self.running = False
            self.watched.open -= 1
            if self.watched.open == 0:
                self.watched.hide()
                self.watched.model.finished.append(self.watched)


class Running(NamedTuple):
    """A call that runs, the whole parameters that it uses, and how often they had been changed when it began."""

    call: ForwardCall
    views: Views
    versions: list[int]


class WatchedModule(SubmoduleUnits):
    """A submodule with hooks that keep its parameters whole while it runs, and only then.

    Attributes:
        open: calls whose backward has begun and is not done.
        is_lent: code outside of its forward reads its parameters, which stay until other units are read.
        stays: backward may begin where no hook sees it, so the units are freed only after the step.
    """

    def __init__(self, name: str, module: nn.Module, units: list[Unit], model: ShardedModel) -> None:
        super().__init__(name, units)
        self.module, self.model = module, model
        self.open = 0
        self.is_lent = self.stays = False
        self._calls: list[Running] = []
        self._before_call: list[dict[int, Any]] = []  # tensors that the containers among the inputs held, per call
        self._freed = [
            [FreedParameter(unit, self, (number, tensor)) for tensor in range(len(unit.layout.names))]
            for number, unit in enumerate(units)
        ]
        why = "FullyShard gathers and frees parameters, which no compiled graph can do"
        self.hooks: list[Any] = [
            RefusesCopies(module, name),
            module.register_forward_pre_hook(
                torch.compiler.disable(self._before, reason=why), with_kwargs=True, prepend=True
            ),
            module.register_forward_hook(torch.compiler.disable(self._after, reason=why), with_kwargs=True),
        ]
        self.hide()

    @property
    def is_busy(self) -> bool:
        """Whether a call of the unit runs, forward or backward."""
        return bool(self._calls or self.open)

    def show(self, views: Sequence[Sequence[Any]]) -> None:
        """Put tensors where the modules look for their parameters."""
        for unit, tensors in zip(self.units, views, strict=True):
            for place in unit.members.places:
                put(place.module, place.attribute, tensors[place.tensor])

    def hide(self) -> None:
        """Put a `FreedParameter` where the modules look for each parameter."""
        self.show(self._freed)

    def settle(self) -> None:
        """Free the units after a forward, unless another call of them runs or they are to stay."""
        if self._calls or self.stays or runs_in_backward():
            return
        self.is_lent = False
        self.hide()
        if not torch.is_grad_enabled() or any(unit.reshard_after_forward for unit in self.units):
            self.free()

    def abandon(self) -> None:
        """Free everything, after an error or at the end of a step."""
        self._calls.clear()
        self._before_call.clear()
        self.open = 0
        self.is_lent = self.stays = False
        self.hide()
        self.free()

    def begin_call(self, *, reads: bool = False) -> Running:
        """Make the units whole for a call, or for code that reads a parameter; begin to gather those that come next."""
        running = self.model.running
        if self._calls and self._calls[-1] in running:  # a tensor that was taken before its unit ran, and is read now
            return self._calls[-1]
        is_next = not runs_in_backward() and not (reads and self.is_lent)
        self.is_lent |= reads
        ahead = self.model.order.begin(self) if is_next else []
        self.finish_gather()
        for one in ahead:
            one.start_gather()
        call = ForwardCall(self, running[-1] if running else None)
        views = [unit.views(call.on_gradients) for unit in self.units]
        self.model.order.note_graph(self.units, views)
        return Running(call, views, [sum(one._version for one in tensors) for tensors in views])

    def end_call(self, running: Running, output: Any, left: Sequence[Tensor] | None = None) -> Any:
        """Return the output, after which backward gathers the units.

        Args:
            running: the call.
            output: what it returns; parts of parameters in it become copies, as their memory is freed.
            left: tensors that it left in containers among its inputs; None where no forward ends.
        """
        if running.versions != [sum(one._version for one in tensors) for tensors in running.views]:
            raise RuntimeError(
                f"unit {self.name or 'root'!r}: its forward changed a parameter in place (an Embedding with "
                "max_norm does). The change would be lost when the unit is freed; compute with a changed copy instead"
            )
        buffers = {unit.buffer.untyped_storage()._cdata for unit in self.units}
        found, is_hidden = find(output)
        if any(_memory_of(one) in buffers for one in found):
            output = replace(output, lambda one: one.clone() if _memory_of(one) in buffers else one)
            found, is_hidden = find(output)
            if any(_memory_of(one) in buffers for one in found):
                raise RuntimeError(
                    f"unit {self.name or 'root'!r} returns a parameter inside a {type(output).__name__}, and its "
                    "memory is freed now; return a copy: parameter.clone()"
                )
        if torch.is_grad_enabled():
            made = [one for one in (*found, *(left or ())) if not isinstance(one, FreedParameter)]
            bases = [one._base for one in made if one._base is not None]  # where a change of a view in place leads
            hooked = [one for one in (*made, *bases) if one.requires_grad and not one.is_leaf]
            for one in hooked:
                one.register_hook(lambda _: running.call.begin_backward(running.views))
            is_trained = any(unit.shard.requires_grad for unit in self.units)
            is_kept_elsewhere = left is not None and not hooked and is_trained  # such as in an attribute
            self.stays |= is_hidden or is_kept_elsewhere
        return output

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        model = self.model
        if model.is_summoned:
            return None
        if self.name == "" and not self._calls and not runs_in_backward():
            model.start_pass()
        check_place(self.name, model.order.thread)
        self._refuse_others()
        running = self.begin_call()
        self._calls.append(running)
        model.running.append(running)
        self.show(running.views)
        if model.precision is not None and self.units:
            args, kwargs = cast_inputs((args, kwargs), self.units[0].compute_dtype)
        if torch.is_grad_enabled():
            if any(not unit.shard.requires_grad for unit in self.units):
                is_watched = watch_inputs(running.call.on_inputs, (args, kwargs))
                running.call.remaining |= {"inputs"} if is_watched else set()
            self._before_call.append({id(one): one.grad_fn for one in kept_in(args, kwargs)})
        return args, kwargs

    def _refuse_others(self) -> None:
        """Refuse another tensor in the place of a parameter: this unit would put its own there."""
        if self._calls or self.open or self.stays:
            return
        for unit in self.units:
            for place in unit.members.places:
                if not isinstance(place.module._parameters.get(place.attribute), FreedParameter):
                    raise RuntimeError(
                        f"{unit.layout.names[place.tensor]} was replaced by another tensor (by functional_call?), and "
                        "FullyShard computes with its own shards; give the tensor to forward, or leave its module to "
                        "no unit: name others in units=[...]"
                    )

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        model = self.model
        if model.is_summoned:
            return None
        running = self._calls.pop()
        model.running.remove(running)
        left: list[Tensor] = []
        if torch.is_grad_enabled() and self._before_call:
            before = self._before_call.pop()
            left = [one for one in kept_in(args, kwargs) if before.get(id(one), before) is not one.grad_fn]
        output = self.end_call(running, output, left)
        if runs_in_backward():  # a forward that is run again for its backward, which comes now
            return output
        running.call.ended, running.call.place = model.order.end(self)
        self.settle()
        if self.name == "" and not self._calls:
            model.end_pass()
        return output


def put(module: nn.Module, attribute: str, value: Any) -> None:
    """Put a tensor where a module looks for its parameter, which need not be a parameter for torch."""
    module._parameters[attribute] = value
    if isinstance(module, nn.RNNBase) and attribute in module._flat_weights_names:
        module._flat_weights[module._flat_weights_names.index(attribute)] = value


def runs_in_backward() -> bool:
    """Return whether autograd's backward is running now, and what runs here runs in it."""
    return bool(torch._C._current_graph_task_id() != -1)


def _memory_of(one: Tensor) -> int | None:
    if isinstance(one, FreedParameter) or not torch._C._has_storage(one):
        return None
    return int(one.untyped_storage()._cdata)
