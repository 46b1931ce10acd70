"""GradientHook: what may stand between a bucket of gradients and the wire.

Data parallelism hands a hook each bucket as it fills, and expects the mean over ranks back in the same memory. The
default is one all-reduce; compression sends less. Neither side knows the other: they meet here.

`LinearHook` is a second meeting: tensor parallelism puts one on a parameter, and what moves parameters keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor
from torch.distributed import ProcessGroup


class GradientBucket(NamedTuple):
    """The gradients of one bucket, on this rank.

    Attributes:
        index: place of the bucket in the order in which buckets are sent; it names the bucket in every step.
        buffer: [E] all gradients of the bucket end to end, and nothing else: this rank's own, not divided.
        gradients: views of the buffer, one per parameter, each of its parameter's shape.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    buffer: Tensor
    gradients: tuple[Tensor, ...]


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> object:
        """Finish it: afterwards the bucket's buffer holds the mean over ranks, the same bits on each."""


@runtime_checkable
class GradientHook(Protocol):
    """Turns each rank's gradients of a bucket into their mean, or into the mean of the parts that it sends.

    All ranks call `start` for the same buckets in the same order, and `wait` in that order too, so a hook may make
    collective calls in both. A hook that remembers something between steps (an error memory, a factor, a generator)
    gives it as its state, by rank: a checkpoint must save every rank's own.
    """

    def start(self, bucket: GradientBucket, group: ProcessGroup | None) -> Pending:
        """Begin to exchange a bucket; do not wait."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must know to go on as if nothing had happened: plain values and tensors."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned on this rank."""


class LinearHook:
    """A hook on a parameter's gradient that is linear in it, such as a sum over ranks.

    It may be called for the gradient of each use of the parameter, and the results add up to the same. So FullyShard,
    whose parameters are made anew for each use, keeps such hooks, and refuses others.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient that takes this one's place; None for None."""
        return None if gradient is None else self._function(gradient)
