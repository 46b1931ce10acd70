"""A shard's gradient while parts of it are on their way: a mark stands in its place.

A loop may forget the gradients of a step at any time, also before `synchronize()`: the loss is NaN, or backward has
failed. It calls zero_grad() of its optimizer, which sees shards alone. What is on its way would come later and be added
to the next step's. So it meets a mark, and `Unit` looks whether that is still there. The mark also refuses a step that
comes too early.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from distlab.sharding.part import FlatShard, absent, as_part

ON_THEIR_WAY = (
    "the gradients of FullyShard's shards are on their way, or no_sync() keeps them whole. Run the last backward of a "
    "step outside of no_sync(), and call synchronize() after it, before clipping and step(); to forget them, call "
    "zero_grad() (with set_to_none=True)"
)


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
        self._shard, self._mark = shard, absent(memory, memory, ON_THEIR_WAY)
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
        self.summed = as_part(total) if self.summed is None else self.summed.add_(total)
        if self.whole is None and not self._num_sums:
            self._shard.grad, self.summed, self._is_under_way = self.summed, None, False

    def heed_zero_grad(self, *finish: Callable[[], None]) -> None:
        """Drop what an optimizer's zero_grad() has forgotten.

        Args:
            finish: wait for sums that are on their way.
        """
        if self._is_forgotten:
            for wait in finish:
                wait()
            self.whole, self.summed, self._is_under_way = None, None, False

    @property
    def _is_forgotten(self) -> bool:
        return self._is_under_way and self._shard.grad is not self._mark
