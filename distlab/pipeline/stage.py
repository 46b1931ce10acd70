"""One stage on its rank: what it keeps of each micro-batch, its forward pass, and its backward pass whole or in parts.

A stage's graph begins at leaves that stand for its inputs and ends at its outputs. Autograd knows nothing of the other
stages: their gradients come in as the outputs' gradients, and the leaves' gradients are what goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distlab.pipeline.backward.layers import WeightWork
from distlab.pipeline.backward.two_parts import SplitBackward, full_backward
from distlab.pipeline.shapes import ValueLayout, put_together, take_apart
from distlab.recompute import recompute


@dataclass
class Kept:
    """What a stage holds of a micro-batch between its forward and the end of its backward pass."""

    leaves: list[Tensor]  # inputs whose gradients are wanted
    outputs: list[Tensor]  # outputs whose gradients will come; of the last stage, the loss
    work: WeightWork | None = None  # from I to W


class Stage:
    """A module at work as one stage.

    Args:
        number: of the stage.
        module: called with what the stage before hands over: a tuple is its positional arguments, anything else its one
            argument.
        splits: whether its schedule has I and W; the module's layers are made ready for it until `close()`.
        recomputes: keep inputs only and run forward again in backward (`distlab.recompute`).

    Attributes:
        kept: by micro-batch, from F until B or W.
    """

    def __init__(self, number: int, module: nn.Module, *, splits: bool = False, recomputes: bool = False) -> None:
        self.number, self.module, self.recomputes = number, module, recomputes
        self.kept: dict[int, Kept] = {}
        self.split = SplitBackward(module) if splits else None

    def forward(
        self,
        microbatch: int,
        tensors: Sequence[Tensor],
        layout: ValueLayout,
        *,
        finish: Callable[[Any], Tensor] | None = None,
    ) -> Any:
        """Run F and keep the tensors that backward needs; return the module's outputs, or `finish` of them (the loss).

        Nothing is kept where gradients are off.

        Shapes: tensors of one micro-batch [B, ...] -> the module's outputs [B, ...], or the loss []
        """
        inputs = [
            tensor.detach().requires_grad_(kind.wants_gradient)
            for tensor, kind in zip(tensors, layout.kinds, strict=True)
        ]
        made = self.call(put_together(layout, inputs))
        if finish is not None:
            made = finish(made)
        if torch.is_grad_enabled():
            outputs = [output for output in take_apart(made)[0] if output.requires_grad]
            self.kept[microbatch] = Kept([leaf for leaf in inputs if leaf.requires_grad], outputs)
        return made

    def call(self, value: Any) -> Any:
        """Call the module with what a stage hands over."""
        arguments = value if type(value) is tuple else (value,)
        return recompute(self.module, *arguments) if self.recomputes else self.module(*arguments)

    def backward(self, microbatch: int, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        """Run B: parameters' gradients add up in `.grad`; return those of the inputs that want one.

        Args:
            microbatch: which one.
            gradients: of the outputs that want one; None where the output is the loss.

        Shapes: gradients [B, ...] like the outputs -> gradients [B, ...] like the inputs
        """
        kept = self.kept[microbatch]
        run = full_backward if self.split is None else self.split.full_backward
        run(kept.outputs, [None] * len(kept.outputs) if gradients is None else gradients)
        del self.kept[microbatch]
        return _gradients(kept.leaves)

    def input_gradient(self, microbatch: int, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        """Run action I: return the gradients of the inputs that want one, and keep what action W needs later.

        I computes gradients of inputs, W (`weight_gradient`) those of weights.

        Shapes: as `backward`.
        """
        assert self.split is not None, "the stage was prepared for I and W where its schedule has them"
        kept = self.kept[microbatch]
        given = [None] * len(kept.outputs) if gradients is None else gradients
        kept.work = self.split.input_gradient(kept.outputs, given)
        leaves, kept.leaves, kept.outputs = kept.leaves, [], []
        return _gradients(leaves)

    def weight_gradient(self, microbatch: int) -> None:
        """Run W: the parameters' gradients that I put off add up in `.grad`."""
        work = self.kept[microbatch].work
        assert self.split is not None, "the stage was prepared for I and W where its schedule has them"
        assert work is not None, "a valid schedule runs I before W"
        self.split.weight_gradient(work)
        del self.kept[microbatch]

    def close(self) -> None:
        """Give the module its own backward back."""
        self.kept.clear()
        if self.split is not None:
            self.split.close()


def _gradients(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves' gradients; one that the stage did not use has zeros."""
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
