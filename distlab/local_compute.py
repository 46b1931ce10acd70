"""LocalCompute: an exchange, what a plain layer computes, an exchange; and where these three come apart.

A tensor-parallel layer is a Linear or an Embedding with something sent before or after it. Whoever wants another
backward for that middle (a pipeline that makes weight gradients later) need not know what is sent, and the layer need
not know who wants it. They meet here.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class LocalCompute(Protocol):
    """A layer whose forward calls `self.local_compute`, once, and sends what it sends outside of that call.

    Somebody may put a function of their own in its place (`layer.local_compute = ...`) that computes the same, with
    another backward; the layer asks `is_replaced` before it takes a shorter way that computes all three at once.

    Attributes:
        local_kind: nn.Linear or nn.Embedding: what `local_compute` computes is that of this kind of layer with the layer's
            own parameters, `weight` and `bias`. The bias' gradient is the sum of the output's, even where this rank's
            output leaves it out. None: nobody calls this layer, its parameters are used in another way.
    """

    local_kind: type[nn.Module] | None

    def local_compute(self, x: Tensor) -> Tensor:
        """Compute the plain layer's output; nothing is sent."""


def is_replaced(layer: nn.Module) -> bool:
    """Return whether somebody put a function in the place of a layer's `local_compute`."""
    return "local_compute" in vars(layer)
