"""Backward in two parts: I makes the gradient of a stage's input, W the gradients of its weights, later.

The stage before waits for the input's gradient alone. The weights' gradients are needed only at the end of the step, so
they fill what would be a bubble. That is all that zero-bubble schedules do, and this file makes it possible.

Two calls of `torch.autograd.grad`, one for the input and one for the weights, walk the graph twice and cost a third
more. Here the graph is walked once, in I. Layers whose weight gradient is a product of its own (Linear, Embedding,
convolutions) compute only their input's gradient on that walk, and note what they know: their input and the gradient of
their output. W multiplies the notes. Read in this order:

1. `LinearPlainly`: the idea on one screen.
2. `SplitBackward`: the same for the layers of any module (`layers` has a rule for each kind), and for the plain part of
   tensor-parallel ones: what they send backward is sent in I, and W sends nothing.

A norm's weight gradient falls out of the pass that makes its input's, so it stays in I, like that of every parameter
that no layer with a rule owns; `report` says which and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distlab.pipeline.backward.layers import LayerRule, Notes, Sums, WeightWork, choose_layers, place_of, rule_of


class LinearPlainly(torch.autograd.Function):
    """The simplest backward pass in two parts, for y = x w^T.

    Backward returns x's gradient and appends (x, y's gradient) to the list `notes`. Action W computes w's gradient
    later: `for x, gradient in notes: w.grad += gradient.T @ x`.

    Shapes: x [N, I], w [O, I] -> y [N, O]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, notes: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute the layer."""
        ctx.save_for_backward(x, w)
        ctx.notes = notes
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Compute half of the backward pass and put the other half off."""
        x, w = ctx.saved_tensors
        ctx.notes.append((x, gradient))
        return gradient @ w, None, None


@dataclass(frozen=True)
class SplitReport:
    """Which parts of a module let their weight gradients wait.

    Attributes:
        deferred: names of the layers whose weight gradients are made in W.
        kept: names of the others that have parameters, with the reason: theirs are made in I.
        deferred_elements: elements of all parameters whose gradients wait.
        num_elements: elements of all parameters that want gradients.
    """

    deferred: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    deferred_elements: int
    num_elements: int

    def __str__(self) -> str:
        share = self.deferred_elements / max(self.num_elements, 1)
        lines = [f"{len(self.deferred)} layers with {share:.1%} of the weights make their weight gradients in W"]
        lines += [f"  in I: {name or 'the module itself'}: {reason}" for name, reason in self.kept]
        return "\n".join(lines)


class SplitBackward:
    """Makes a module's backward pass in two parts.

    Forward passes are computed as before and may be many before the first backward; every backward of a graph built
    since then goes through `input_gradient` and `weight_gradient`, or `full_backward`. A plain `loss.backward()`
    works too, and defers nothing. `close()` gives the module its own forward back.

    What is passed as gradients, and the module's inputs, must not be written before the weight gradients are made.

    I and W together take at most 1.05 times as long as one full backward (benchmarks/pipeline_overlap.py measures it).

    Args:
        module: its layers' `forward` (`local_compute` of those that have one) is replaced until `close()`; parameters,
            names and hooks stay.

    Cost: between I and W, the input of each deferred layer and the gradient of its output stay in memory
        (`WeightWork.num_bytes`); what else forward kept is freed in I.
    Error: exact up to the order of sums: a product may be added to `.grad` as it is computed, not after.

    Raises:
        ValueError: the module is split already.

    Source: Qi et al. 2024 (arXiv:2401.10241), section 2: our I is their B.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._work: WeightWork | None = None
        self._pass = -1  # torch's number of the backward pass that is an I: of others within it nothing waits
        for name, layer in module.named_modules():
            if getattr(vars(layer).get(place_of(layer)), "func", None) is _forward:
                raise ValueError(
                    f"{name or 'the module'} makes its backward in two parts already; close() the first split"
                )
        layers, kept = choose_layers(module)
        self._layers = list(layers.values())
        parameters = {p for layer in self._layers for p in layer.parameters(recurse=False) if p.requires_grad}
        self.report = SplitReport(
            tuple(layers),
            tuple(kept.items()),
            sum(p.numel() for p in parameters),
            sum(p.numel() for p in module.parameters() if p.requires_grad and not is_lazy(p)),
        )
        for layer in self._layers:
            place, rule = place_of(layer), rule_of(layer)
            assert rule is not None, "layers without a rule were not chosen"
            bias = layer._parameters.get("bias")
            part = _Part(layer, rule, getattr(layer, place), layer._parameters["weight"], bias)  # type: ignore[arg-type]
            setattr(layer, place, partial(_forward, self, part))

    def input_gradient(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> WeightWork:
        """Run I: inputs that are leaves get their `.grad`, and parameters whose gradient cannot wait get theirs.

        Shapes: outputs [B, ...] and gradients of the same shapes -> `.grad` of each leaf, in its shape

        Args:
            outputs: what forward returned; those without a graph are passed over.
            gradients: one for each output; None for a scalar loss, or for an output that was not used.

        Returns:
            What W has to do. Without it, the gradients of the deferred layers are lost.
        """
        work = self._work = WeightWork()
        begun = [_Begin.apply(one, self) if one.requires_grad else one for one in outputs]  # type: ignore[no-untyped-call]
        try:
            full_backward(begun, gradients)
        finally:
            self._work, self._pass = None, -1
        return work

    def weight_gradient(self, work: WeightWork) -> None:
        """Run W: make the gradients that `input_gradient` put off."""
        work.run()

    def full_backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Run B: I and W, one after the other.

        Shapes: as `input_gradient`.
        """
        self.input_gradient(outputs, gradients).run()

    def close(self) -> None:
        """Give the layers their own methods back."""
        for layer in self._layers:
            vars(layer).pop(place_of(layer), None)
        self._layers = []

    def defers(self, notes: Notes) -> bool:
        """Keep a layer's notes for W. Return False outside of I and in a backward that a hook runs itself."""
        if self._work is None or self._pass != torch._C._current_graph_task_id():
            return False
        self._work.add(notes)
        return True


prepare_split = SplitBackward  # by the name of what it does to a module


def full_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Run an ordinary backward pass from several outputs.

    Outputs without a graph are passed over, and so are outputs that were not used: those without a gradient that are
    not scalars.
    """
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad and (gradient is not None or output.numel() == 1)
    ]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


class _Begin(torch.autograd.Function):
    """Pass an output on; backward, it comes before all else and says which pass this is."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, split: SplitBackward) -> Tensor:
        ctx.split = split
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.split._pass = torch._C._current_graph_task_id()
        return gradient, None


class _Part(NamedTuple):
    """A layer that was chosen, its rule, and the method that `_forward` stands in for."""

    layer: Any
    rule: LayerRule
    compute: Callable[..., Any]
    weight: nn.Parameter
    bias: nn.Parameter | None


class _Layer(torch.autograd.Function):
    """A layer with a rule: forward as ever; in I backward goes only down to its input, and leaves a note.

    Outside of I it returns all gradients, and they can be differentiated again. So a plain `loss.backward()` works, and
    so does `torch.autograd.grad` in the middle of a forward pass (a gradient penalty).
    """

    @staticmethod
    def forward(ctx: Any, split: SplitBackward, part: _Part, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.split, ctx.part = split, part
        y = part.compute(x)
        # Linear may return a view, which the next layer could not change in place; nothing else has what it views.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer, rule = ctx.part.layer, ctx.part.rule
        from_input = rule.input_gradient(layer, x, weight, gradient) if ctx.needs_input_grad[2] else None
        notes = Notes(rule, layer, x, gradient)
        if ctx.split.defers(notes):
            return None, None, from_input, None, None
        sums = Sums(holds_all=True)
        rule.weight_gradients(notes, sums)
        return None, None, from_input, sums.take(ctx.part.weight), sums.take(ctx.part.bias)


def _forward(split: SplitBackward, part: _Part, *inputs: Any, **named: Any) -> Any:
    """Stand in for a layer's forward, or its plain part; a call that no rule is for runs as ever."""
    given = (*inputs, *named.values())
    if not _can_wait(part, given) or named.keys() - {"input"}:
        return part.compute(*inputs, **named)
    own = _without_hooks(part.weight), _without_hooks(part.bias)
    return _Layer.apply(split, part, given[0], *own)  # type: ignore[no-untyped-call]


def _without_hooks(parameter: nn.Parameter | None) -> Tensor | None:
    """Return a parameter; or, where it has hooks, a leaf in its place: autograd would call them in I, too early."""
    if parameter is None or not parameter._post_accumulate_grad_hooks or not parameter.requires_grad:
        return parameter
    leaf = parameter.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(partial(_hand_on, parameter))
    return leaf


def _hand_on(parameter: nn.Parameter, leaf: Tensor) -> None:
    """Give a parameter the gradient that its leaf got outside of I."""
    if leaf.grad is not None:
        torch.autograd.backward(parameter, leaf.grad)
        leaf.grad = None


def _can_wait(part: _Part, given: Sequence[Any]) -> bool:
    """Return whether this call is one that the layer's rule is for. This runs in every forward pass, so it is short."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    if len(given) != 1 or type(given[0]) not in (Tensor, nn.Parameter) or given[0].layout is not torch.strided:
        return False
    now = part.layer._parameters  # other tensors may stand in for its own (torch.func, sharding, a parametrization)
    if now.get("weight") is not part.weight or now.get("bias") is not part.bias:
        return False
    own = [parameter for parameter in (part.weight, part.bias) if parameter is not None]
    if not any(parameter.requires_grad for parameter in own) or torch._C._are_functorch_transforms_active():
        return False
    return not any(parameter._backward_hooks for parameter in own)  # autograd would call them in I, with None
