"""ScatterInBackward: buckets are summed during backward, in one order on all ranks, and few at once.

At most `MAX_UNDER_WAY` sums are under way. Backward waits for an earlier one before it fills a new bucket. Otherwise
a slow link would let buffers pile up until, with ZeRO-2 too, whole gradients were in memory after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.gradients.flat_gradients import SendInBackward
from distlab.blocks.gradients.gradient_status import UNUSED
from distlab.blocks.replicate import broadcast_each, every_parameter
from distlab.plan import assign_buckets
from distlab.sharding.zero.shard_bucket import BufferPool, Kind, ShardBucket
from distlab.trace import SpanWriter

MAX_UNDER_WAY = 2

Named = tuple[str, nn.Parameter]


class ScatterInBackward:
    """Sums the buckets' gradients over their group while backward computes them.

    Args:
        buckets: in the order in which they are sent.
        stage: of ZeRO, 1 or 2.
        spans: draws each sum on the lane "scatter".
        on_second: called in backward when a parameter got a second gradient; must raise, on all ranks.
    """

    def __init__(
        self, buckets: Sequence[ShardBucket], *, stage: int, spans: SpanWriter | None, on_second: Callable[[], None]
    ) -> None:
        self.buckets, self.stage, self.spans, self._on_second = buckets, stage, spans, on_second
        self._accumulating = self._ends_with_backward = False
        self._num_finished = 0
        self._sending = SendInBackward(buckets, lambda bucket: bucket.start(spans), self._on_gradient)
        self._hooks = [
            parameter.register_hook(_make_way(bucket, slot))
            for bucket in buckets
            for slot, parameter in enumerate(bucket.parameters)
        ]

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let backward passes in this block keep their gradients (stage 1), or end with a sum each (stage 2)."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @property
    def is_stale(self) -> bool:
        """Whether gradients have come, or were forgotten, since the last sums were handed out."""
        slots = [(bucket, slot) for bucket in self.buckets for slot in range(len(bucket.parameters))]
        return any(bucket.statuses[slot] != UNUSED or bucket.lost_mark(slot) for bucket, slot in slots)

    def finish_pass(self) -> None:
        """Take what backward did not bring, and wait for all sums; every rank gets here once per pass."""
        self._ends_with_backward = False
        for bucket in self.buckets[self._sending.num_started :]:
            self._make_room(bucket)
            bucket.take_rest()
            self._sending.start_full()
        self._finish(len(self.buckets))
        self.buckets[0].pool.free("arriving")  # the update wants the memory
        self._sending.reset()
        self._num_finished = 0

    def close(self) -> None:
        """Take the hooks off the module."""
        self._sending.close()
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, bucket: ShardBucket, slot: int) -> bool:
        if not bucket.note(slot):
            self._on_second()
        if self._accumulating and self.stage == 1:
            return False
        if self._accumulating and not self._ends_with_backward:
            self._ends_with_backward = True
            # A pass must make the same calls on every rank, used parameters or not, so its end is the place.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_pass)
        self._make_room(bucket)
        return True

    def _make_room(self, bucket: ShardBucket) -> None:
        """Before a bucket's first gradient: wait until few enough sums are under way."""
        if bucket.num_packed == 0:
            self._finish(self._sending.num_started - MAX_UNDER_WAY + 1)

    def _finish(self, end: int) -> None:
        while self._num_finished < end:
            self.buckets[self._num_finished].finish()
            self._num_finished += 1


def _make_way(bucket: ShardBucket, slot: int) -> Callable[[Tensor], None]:
    """Return a hook that removes a parameter's mark before backward adds to it."""

    def make_way(_: Tensor) -> None:
        bucket.take_mark(slot)

    make_way.__torch_unserializable__ = True  # type: ignore[attr-defined]  # or torch.save warns
    return make_way


def make_buckets(
    named: Sequence[Named], bucket_bytes: int, group: ProcessGroup | None, *, owners: dict[str, int] | None, keep: bool
) -> list[ShardBucket]:
    """Put parameters into buckets of one dtype and device, last first, since backward ends with the first.

    Raises:
        ValueError: bucket_bytes is less than one.
    """
    buckets: list[ShardBucket] = []
    pool = BufferPool()
    kinds: dict[Kind, list[Named]] = {}
    for name, parameter in named:
        kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    for same in kinds.values():
        sizes = [parameter.numel() * parameter.element_size() for _, parameter in same]
        for planned in assign_buckets(sizes, bucket_bytes):
            members = [same[index] for index in planned.parameters]
            own = None if owners is None else [owners[name] for name, _ in members]
            buckets.append(ShardBucket(len(buckets), members, own, group, keep=keep, pool=pool))
    return buckets


def broadcast_start(module: nn.Module, group: ProcessGroup | None) -> None:
    """Give every rank the parameters and buffers of the group's first rank.

    Cost: one broadcast per parameter and buffer.
    """
    broadcast_each([*(parameter for _, parameter in every_parameter(module)), *module.buffers()], group)
