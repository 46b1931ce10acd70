"""LocalCompute: the part of a tensor-parallel layer that a rank computes by itself, between what the layer sends.

A tensor-parallel layer is a Linear or an Embedding with an exchange before or after it. A pipeline that computes weight
gradients later wants a different backward for that middle part. It need not know what is sent, and the layer need not
know about the pipeline. They meet here.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class LocalCompute(Protocol):
    """A layer whose forward calls `self.local_compute`, once, and sends what it sends outside of that call.

    A caller may replace it (`layer.local_compute = ...`) by one that computes the same with a different backward.
    The layer asks `is_replaced` before it takes a shorter way that computes and sends at once.

    Attributes:
        local_kind: nn.Linear or nn.Embedding: `local_compute` computes what this kind of layer does, with the layer's
            own `weight` and `bias`. The bias' gradient is the sum of the output's, even where this rank's output leaves
            it out. None: this layer is not called; its parameters are used in a different way.
    """

    local_kind: type[nn.Module] | None

    def local_compute(self, x: Tensor) -> Tensor:
        """Compute the plain layer's output; nothing is sent."""


def is_replaced(layer: nn.Module) -> bool:
    """Return whether a layer's `local_compute` was replaced."""
    return "local_compute" in vars(layer)
