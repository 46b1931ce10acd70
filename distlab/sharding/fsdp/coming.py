"""A shard's gradient while parts of it are on their way: a mark stands in its place.

A loop may forget the gradients of a step at any time, also before `synchronize()`: the loss is NaN, or backward has
failed. It calls zero_grad() of its optimizer, which sees shards alone. What is on its way would come later and be added
to the next step's. So it meets a mark, and `Unit` looks whether that is still there. The mark also refuses a step that
comes too early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from distlab.sharding.shard_gradient import AbsentGradient, FlatShard, absent, of_shard


class ComingGradient(AbsentGradient):
    """The mark: it has a shape, and no values.

    Attributes:
        is_zeroed: zero_grad(set_to_none=False) was called: what is there, and what is on its way, is to be zeros.
    """

    is_zeroed = False
    why = (
        "the gradients of FullyShard's shards are on their way, or no_sync() keeps them whole. Run the last backward "
        "of a step outside of no_sync(), and call synchronize() after it, before clipping and step()"
    )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note zeroing; answer and refuse the rest as an `AbsentGradient`.

        Raises:
            ValueError: the function wants values.
        """
        name = getattr(func, "__name__", "")
        if name == "requires_grad_":  # zero_grad() asks before it zeroes
            return args[0]
        if name not in ("zero_", "_foreach_zero_"):
            return super().__torch_function__(func, types, args, kwargs)
        for one in args[0] if name == "_foreach_zero_" else args[:1]:
            if isinstance(one, ComingGradient):
                one.is_zeroed = True
            else:
                one.zero_()
        return args[0]


class Coming:
    """What there is of one shard's gradient until all parts have come.

    Args:
        shard: whose gradient it is.
        memory: the shard's own values.

    Attributes:
        whole: the sum of passes that no_sync keeps whole on this rank.
        summed: what was summed over the ranks before, while the mark stands in its place.
    """

    def __init__(self, shard: FlatShard, memory: Tensor) -> None:
        self.whole: Tensor | None = None
        self.summed: Tensor | None = None
        self._shard, self._mark = shard, absent(memory, memory, ComingGradient)
        self._is_under_way, self._num_sums = False, 0

    def begin(self, *, sums: bool) -> None:
        """Put the mark in the gradient's place: a sum will come, or a gradient is about to be kept whole."""
        if not self._is_under_way:
            self.summed, self._shard.grad, self._is_under_way = self._shard.grad, self._mark, True
        self._num_sums += sums

    def add(self, total: Tensor) -> None:
        """Add a sum that has come, unless it was forgotten; with the last one the gradient is back in its place.

        Shapes: total [L]
        """
        self._num_sums -= 1
        if self._is_forgotten:
            return
        if self._mark.is_zeroed:
            total.zero_()
            self._zero()
        self.summed = of_shard(total) if self.summed is None else self.summed.add_(total)
        if self.whole is None and not self._num_sums:
            self._shard.grad, self.summed, self._is_under_way = self.summed, None, False

    def heed_zero_grad(self, *finish: Callable[[], None]) -> None:
        """Drop what an optimizer's zero_grad() has forgotten, or let it be zeros.

        Args:
            finish: wait for sums that are on their way.
        """
        if self._is_forgotten or self._mark.is_zeroed:
            for wait in finish:
                wait()
            if self._is_forgotten:
                self.whole, self.summed, self._is_under_way = None, None, False
            self._zero()

    @property
    def _is_forgotten(self) -> bool:
        return self._is_under_way and not isinstance(self._shard.grad, ComingGradient)

    def _zero(self) -> None:
        for kept in (self.whole, self.summed):
            if kept is not None:
                kept.zero_()
        self._mark.is_zeroed = False
