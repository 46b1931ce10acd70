"""What tensor-parallel ranks send each other: three things, each started when it is made and over with `finish()`.

`Sum` (an all-reduce), and its two halves along the sequence, `SequenceGather` and `SequenceScatterSum`. Between start
and finish a rank computes something else. In a group of one rank nothing is sent.

The sequence is the last dim but one: [..., S, H].
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.blocks.flat import all_gather_single
from distlab.collectives import DirectScatter
from distlab.comm.p2p import group_rank


class Sum:
    """A tensor that is summed over the ranks, in place.

    Shapes: any, contiguous; no other code may hold this memory.
    Cost: an all-reduce: 2 (t-1)/t of its bytes sent per rank.
    Error: every rank gets the same bits, and the same input gives them again.

    Args:
        tensor: what is summed.
        group: the ranks.
        waits: wait at once, which costs less than to start and then to wait.
    """

    def __init__(self, tensor: Tensor, group: ProcessGroup | None = None, *, waits: bool = False) -> None:
        self._tensor = tensor
        self._work: dist.Work | None = None
        if dist.get_world_size(group) > 1:
            starts = not waits or torch.compiler.is_compiling()  # a graph cannot hold a call that waits
            self._work = dist.all_reduce(tensor, group=group, async_op=starts)

    def finish(self) -> Tensor:
        """Wait, and return the sum."""
        if self._work is not None:
            self._work.wait()
        return self._tensor


class SequenceGather:
    """Parts of a sequence on their way to every rank.

    Shapes: x [..., S/t, H] -> [..., S, H]
    Cost: an all-gather: (t-1)/t of the result's bytes sent per rank. One copy, unless all dims before S are 1.
    Error: exact: bytes are copied.
    """

    def __init__(self, x: Tensor, group: ProcessGroup | None = None) -> None:
        self._full = self._own = x.contiguous()
        self._work: dist.Work | None = None
        num_ranks = dist.get_world_size(group)
        if num_ranks > 1:
            self._full = x.new_empty(num_ranks * x.numel())
            self._work = all_gather_single(self._full, self._own.view(-1), group=group, async_op=True)

    def finish(self) -> Tensor:
        """Wait, and return the whole sequence."""
        if self._work is None:
            return self._own
        self._work.wait()
        return self._full.view(-1, *self._own.shape).movedim(0, -3).flatten(-3, -2)  # [..., t, S/t, H] -> [..., S, H]


class SequenceScatterSum:
    """A sequence that is summed over the ranks, and of which each rank keeps its part.

    It is a direct exchange (`distlab.collectives.direct`), which runs by itself until the result is wanted.

    Shapes: x [..., S, H] -> [..., S/t, H]
    Cost: (t-1)/t of x's bytes sent per rank. Memory: x once more, and on gloo the t-1 parts that arrive.
    Error: parts are added in the order of the ranks, so the same input gives the same bits again.
    """

    def __init__(self, x: Tensor, group: ProcessGroup | None = None) -> None:
        num_ranks = dist.get_world_size(group)
        self._x = x
        self._scatter: DirectScatter | None = None
        if num_ranks > 1:
            cut = x.unflatten(-2, (num_ranks, -1)).movedim(-3, 0).contiguous()  # [t, ..., S/t, H]
            self._shape = cut.shape[1:]
            self._scatter = DirectScatter(cut.view(-1), group, by_rank=True)

    def finish(self) -> Tensor:
        """Wait, add up, and return this rank's part of the sum."""
        return self._x if self._scatter is None else self._scatter.finish().view(self._shape)


def check_sequence(x: Tensor, group: ProcessGroup | None, *, what: str) -> None:
    """Refuse a sequence that the ranks do not divide; a ValueError names its length.

    Shapes: x [..., S, H]
    """
    num_ranks = dist.get_world_size(group)
    if x.dim() < 2:
        raise ValueError(f"rank {group_rank(group)}: {what} got shape {list(x.shape)}; expected [..., S, H]")
    if x.shape[-2] % num_ranks:
        raise ValueError(
            f"rank {group_rank(group)}: {what} got a sequence of {x.shape[-2]} positions, which {num_ranks} ranks do "
            f"not divide; pad it to a multiple of {num_ranks}"
        )
