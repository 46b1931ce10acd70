"""A unit's gradient, from backward to its shard: end to end, on its way, in the host's memory.

1. `put_end_to_end`, `mark` and `note_unused`: several tensors lie in one flat gradient. Which of them has no rank a
   gradient of? A rank without one adds -0.0 to the sum; no rank adds it otherwise. A sum is -0.0 only if all its parts
   are. So the sum itself tells, and nothing more is sent. A step passes such tensors by, as in one process: see `step`.
2. `GradientMemory`: where a whole gradient waits to be summed.
3. `PendingGradient`: until `synchronize()` a mark stands in the gradient's place. It refuses a step that comes too
   early, and tells of an optimizer's zero_grad(), which would forget what is not there yet.
4. `HostGradient`: an offloaded gradient is copied to the host's memory while backward goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.device import CopyStream, event, host_memory_for, wait_for_event
from distlab.comm.shared_memory.group import buffer_of
from distlab.plan import FlatLayout
from distlab.sharding.part import FlatShard, as_part, nowhere, plain

ON_THEIR_WAY = (
    "the gradients of FullyShard's shards are on their way, or no_sync() keeps them whole. Run the last backward of a "
    "step outside of no_sync(), and call synchronize() after it, before clipping, step() and an optimizer's "
    "zero_grad(); to forget them earlier call the FullyShard's own zero_grad()"
)


def put_end_to_end(flat: Tensor, gradients: Sequence[Tensor | None], layout: FlatLayout) -> None:
    """Copy gradients into a flat one: zeros for None, and 0.0 for -0.0.

    Shapes: flat [n L]

    Raises:
        RuntimeError: gradients are sparse, and have no place in a flat one; the text names their tensors.
    """
    sparse = [name for name, one in zip(layout.names, gradients, strict=True) if one is not None and one.is_sparse]
    if sparse:
        raise RuntimeError(
            f"rank {dist.get_rank()}: {', '.join(sparse)} got a sparse gradient, and shards hold dense ones. Build the "
            "layer with sparse=False"
        )
    flat[layout.num_elements :].zero_()
    both = list(zip(flat[: layout.num_elements].split(layout.sizes), gradients, strict=True))
    if all(one is None or (one.is_cpu and one.dtype == flat.dtype) for one in gradients):
        for part, one in both:  # one pass for both; on a GPU it would be many kernels
            part.zero_() if one is None else torch.add(one.reshape(-1), 0.0, out=part)
        return
    rows = [torch.zeros_like(part) if one is None else one.reshape(-1) for part, one in both]
    torch.cat(rows, out=flat[: layout.num_elements])
    flat.add_(0.0)  # -0.0 becomes 0.0


def mark(flat: Tensor, layout: FlatLayout, unused: Iterable[int]) -> None:
    """Make the gradients of tensors that this rank did not use -0.0; no other number is.

    Shapes: flat [n L]
    """
    for tensor in unused:
        flat[layout.offsets[tensor] :][: layout.sizes[tensor]].fill_(-0.0)


def note_unused(shard: FlatShard, total: Tensor, unused_here: set[int], *, adds: bool) -> None:
    """Read from a sum over ranks which tensors no rank had a gradient of.

    Args:
        shard: whose gradient it is.
        total: the sum, before anything else is done to it.
        unused_here: tensors that this rank had no gradient of; no others are looked at.
        adds: it is added to a gradient that the shard has.

    Shapes: total [L]
    """
    parts = zip(shard.pieces, shard.cut(total), strict=True) if unused_here else ()
    mine = ((piece.slot, part[0]) for piece, part in parts if piece.slot in unused_here)
    found = {slot for slot, number in mine if number == 0 and torch.signbit(number)}
    shard.unused = found.intersection(shard.unused) if adds else found


class GradientMemory:
    """Where a unit's whole gradient waits to be summed: memory for one unit's at a time.

    Ranks that share memory take one buffer for it, which all of them can read, so that the sum needs no copy. Elsewhere
    each gradient has memory of its own.

    Args:
        group: ranks that sum them.
        device: where gradients lie.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self._largest_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Reserve room for this many bytes, before the first gradient comes."""
        self._largest_bytes = max(self._largest_bytes, num_bytes)

    @cached_property
    def _buffer(self) -> Tensor | None:
        return buffer_of(self._largest_bytes, dtype=torch.uint8, device=self.device, group=self.group)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory without values; the gradient that was in it before has been summed by all ranks.

        Every rank calls this for the same units in the same order: the first call makes the buffer together.
        """
        if self._buffer is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return self._buffer[: numel * dtype.itemsize].view(dtype)


class PendingGradient:
    """What there is of one shard's gradient until all parts have come.

    Args:
        shard: whose gradient it is.

    Attributes:
        whole: the sum of passes that no_sync keeps whole on this rank.
        summed: what was summed over the ranks so far, while the mark stands in its place.
    """

    def __init__(self, shard: FlatShard) -> None:
        self.whole: Tensor | None = None
        self.summed: Tensor | None = None
        self._shard, self._mark, self._is_marked = shard, nowhere(plain(shard), plain(shard), ON_THEIR_WAY), False

    def begin(self) -> None:
        """Put the mark in the gradient's place: a sum will come, or a gradient is about to be kept whole."""
        self.check()
        if not self._is_marked:
            self.summed, self._shard.grad, self._is_marked = self._shard.grad, self._mark, True

    def add(self, total: Tensor) -> None:
        """Add a sum that has come.

        Shapes: total [L]
        """
        self.summed = as_part(total) if self.summed is None else self.summed.add_(total)

    def settle(self) -> None:
        """Put the gradient back in its place: all sums have come."""
        self.check()
        if self._is_marked and self.whole is None:
            self._shard.grad, self.summed, self._is_marked = self.summed, None, False

    def check(self) -> None:
        """Refuse, by a RuntimeError, a gradient that was forgotten or replaced while parts of it are on their way."""
        if self._is_marked and self._shard.grad is not self._mark:
            raise RuntimeError(f"rank {dist.get_rank()}: a gradient was forgotten or replaced: {ON_THEIR_WAY}")

    def forget(self) -> None:
        """Forget the gradient; nothing is on its way any more."""
        self.whole, self.summed, self._shard.grad, self._is_marked = None, None, None, False


class HostGradient:
    """Copies of one shard's gradients on their way from the GPU to the host's memory, one at a time.

    The copy runs in a stream of its own, into pinned memory that is made once. The host waits for it where the step
    ends, not where the copy begins. Without a GPU the copy is over at once.

    Cost: pinned host memory of the shard's size; twice that where passes accumulate without `zero_grad()`.
    """

    def __init__(self, to_host: CopyStream) -> None:
        self._to_host = to_host
        self._memory: list[Tensor] = []
        self._arriving: Tensor | None = None
        self._arrived: Any = None

    def start(self, total: Tensor, kept: Tensor | None) -> None:
        """Begin to copy a gradient; `kept` is the one that the host holds, which must stay as it is.

        Shapes: total [L], kept [L]
        """
        landing = self._memory_apart_from(total, kept)
        with self._to_host.after_current():
            landing.copy_(total, non_blocking=True)
            self._arrived = event(self._to_host.place)
        self._to_host.keep(total)
        self._arriving = landing

    def finish(self) -> Tensor | None:
        """Let the host wait for the copy, and return it; None where none was begun."""
        if self._arriving is None:
            return None
        wait_for_event(self._arrived)
        arrived, self._arriving = self._arriving, None
        return arrived

    def _memory_apart_from(self, total: Tensor, kept: Tensor | None) -> Tensor:
        for memory in self._memory:
            if kept is None or memory.data_ptr() != kept.data_ptr():
                return memory
        self._memory.append(host_memory_for(total))
        return self._memory[-1]
