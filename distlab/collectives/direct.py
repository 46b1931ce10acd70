"""Direct exchange: a gather and a reduce-scatter that run by themselves while a rank computes, each in one step.

Gather: each rank sends its shard to every other rank, straight into its place in their full buffer. Reduce-scatter:
each rank sends every other rank the part that it keeps, and adds up what arrives. Both send (n-1)/n of the whole, as a
ring does, and a rank does nothing until it wants the result. A ring must pass chunks on. On the CPU that takes a thread
that competes with backward. gloo's own all-gather works in a second buffer as large as the first, and copies. nccl and
shared memory do better than both, so their own calls are made there.

The price of the reduce-scatter is memory: n-1 parts arrive at once, where a ring holds one or two pieces.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.blocks.flat import all_gather_single, reduce_scatter_single
from distlab.comm.p2p import PendingCalls, Receive, Send, has_own_halves, start


class DirectGather:
    """Shards that travel into a full buffer: the sends start when this is made and end with `finish()`.

    Shapes: shard [L], full [n L]; contiguous, of one dtype; keep both until `finish()`.
    Cost: (n-1) L elements sent per rank, n-1 messages (nccl, shared: one all-gather). Memory: none.
    Error: exact: bytes are copied.
    """

    def __init__(self, full: Tensor, shard: Tensor, group: ProcessGroup | None = None) -> None:
        num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._shard = shard
        self._pending: PendingCalls | dist.Work | None
        if has_own_halves(full, group):
            self._pending = all_gather_single(full.detach(), shard.detach(), group=group, async_op=True)
            return
        parts = full.chunk(num_ranks)
        others = _others(rank, num_ranks)
        receives = [Receive(parts[other], other) for other in reversed(others)]
        self._pending = start(*receives, *(Send(shard, other) for other in others), group=group)
        parts[rank].copy_(shard)

    @property
    def work(self) -> dist.Work | None:
        """The group's own call; None where the messages are distlab's."""
        return None if isinstance(self._pending, PendingCalls) else self._pending

    def finish(self) -> None:
        """Wait until the full buffer is whole and the shard may be written."""
        if self._pending is not None:
            self._pending.wait()


class DirectScatter:
    """A flat tensor that is summed over ranks, and of which each rank keeps one part of the sum.

    The sends start when this is made and end with `finish()`.

    Shapes: full [n L] -> [L]; contiguous; keep it until `finish()`.
    Cost: (n-1) L elements sent per rank, n-1 messages (nccl, shared: one reduce-scatter). Memory: n-1 parts, or 1.
    Error: parts are added in one order, so the same input gives the same bits again. The order is that of the ranks
        from this one on; with `by_rank` it is 0, 1, 2, ... (shared: always; nccl: its own order).

    Args:
        full: what this rank adds to every part.
        group: the ranks.
        landing: memory for what arrives, (n-1) L elements, which is free again after `finish()`; None takes new memory.
        in_place: leave the sum of messages in this rank's part of `full`; else it has memory of its own, and `full` is
            unchanged.
        by_rank: add the parts in the order of the ranks; not together with in_place.

    Attributes:
        arriving: where the other ranks' parts land (nccl, shared: where the sum does).
        work: the group's own call; None where the messages are distlab's.
    """

    def __init__(
        self,
        full: Tensor,
        group: ProcessGroup | None = None,
        *,
        landing: Tensor | None = None,
        in_place: bool = False,
        by_rank: bool = False,
    ) -> None:
        assert not (in_place and by_rank), "in place the own part comes first"
        num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        parts = full.chunk(num_ranks)
        self._full = full  # read until it is over
        self._own, self._in_place = parts[rank], in_place
        self.arriving: list[Tensor] = []
        self._pending: PendingCalls | None = None
        self.work: dist.Work | None = None
        if num_ranks == 1:
            return
        if has_own_halves(full, group):
            self.arriving = _memory_for(1, self._own, landing)
            self.work = reduce_scatter_single(self.arriving[0], full, group=group, async_op=True)
            return
        others = _others(rank, num_ranks)
        self.arriving = _memory_for(len(others), self._own, landing)
        receives = [Receive(part, other) for part, other in zip(self.arriving, others, strict=True)]
        self._pending = start(*receives, *(Send(parts[other], other) for other in reversed(others)), group=group)
        first = num_ranks - rank if by_rank else 0  # place of rank 0 in a list that begins with this rank
        in_order = [self._own, *self.arriving]
        self._summands = in_order[first:] + in_order[:first]

    def wait(self) -> None:
        """Wait until every part is here; nothing is added up yet, unless the group's own call did."""
        if self.work is not None:
            self.work.wait()
        if self._pending is not None:
            self._pending.wait_received()

    def finish(self) -> Tensor:
        """Wait, add up what arrived, and return the sum of this rank's part.

        Shapes: [L]
        """
        self.wait()
        if self.work is not None:
            return self.arriving[0]
        if self._pending is None:
            return self._own
        total, second, *rest = self._summands
        if total is self._own and not self._in_place:  # a + b is b + a: add in memory that is not `full`'s
            total, second = second, total
        for part in (second, *rest):
            total.add_(part)
        self._pending.wait()
        return total


def _memory_for(count: int, part: Tensor, landing: Tensor | None) -> list[Tensor]:
    """Return memory for `count` parts as large as this one, out of `landing` where it is given."""
    if landing is None:
        return [torch.empty_like(part) for _ in range(count)]
    return list(landing[: count * part.numel()].split(part.numel()))


def _others(rank: int, num_ranks: int) -> list[int]:
    """Return the other ranks, from the next on: so no two ranks begin with the same one."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]
