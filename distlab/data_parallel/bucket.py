"""Bucket: gradients that travel together, as views of one buffer.

A backward pass hands over one gradient after the other (`take`). When all are there, or at the end of the step, the
bucket is sent (`start`), and later its buffer holds the mean over ranks (`wait`). It travels by one all-reduce, or as a
`GradientHook` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.blocks.flat import FlatBuffer
from distlab.blocks.gradient_hook import GradientBucket, GradientHook, Pending
from distlab.blocks.gradients.flat_gradients import HALF, GradientSlots, TimedWork
from distlab.blocks.gradients.gradient_status import NOT_FINITE, SPARSE, UNUSED, USED
from distlab.comm.p2p import needs_batches
from distlab.comm.shared_memory.group import zeros
from distlab.trace import SpanWriter

CACHE_LINE_BYTES = 64


class Bucket(GradientSlots):
    """One buffer, and a view of it for each parameter; all ranks of the group make a bucket together.

    With an all-reduce, gradients are divided by the number of ranks as they are copied in. The buffer then ends in
    `num_flags` further elements, and is rounded up to a cache line per rank. A hook gets them as they are, and no more.

    Attributes:
        flags: the further elements, with which a rank tells the others more.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[nn.Parameter],
        group: ProcessGroup | None,
        *,
        num_flags: int = 0,
        hook: GradientHook | None = None,
        check_finite: bool = True,
    ) -> None:
        self.index = index
        self.hook = hook
        num_ranks = dist.get_world_size(group)
        flags = [parameters[0].detach().new_empty(()) for _ in range(num_flags)]
        self.flat = (
            FlatBuffer(
                [*parameters, *flags], multiple_of=CACHE_LINE_BYTES * num_ranks, zeros=partial(zeros, group=group)
            )
            if hook is None
            else FlatBuffer(parameters)
        )
        self.views = self.flat.views[: len(parameters)]
        self.flags = self.flat.views[len(parameters) :]
        self._scale = 1 / num_ranks
        self._check_finite = check_finite
        self._sum_dtype = torch.float32 if self.flat.buffer.dtype in HALF else None  # a sum may exceed float16's range
        super().__init__(parameters)

    def reset(self) -> None:
        """Be ready for the next step."""
        super().reset()
        self._sums: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._work: TimedWork | None = None

    def pack(self, slot: int) -> None:
        """Copy a parameter's gradient to its place and make that place the gradient; where there is none, zeros."""
        parameter, view = self.parameters[slot], self.views[slot]
        gradient = parameter.grad
        if gradient is not None and gradient is not view and self.statuses[slot] == UNUSED:  # set by hand
            self.statuses[slot] = USED
        if gradient is None:
            view.zero_()
        elif gradient.layout is not torch.strided:
            self.statuses[slot] = SPARSE
            view.zero_()
        else:
            if gradient.requires_grad:  # backward(create_graph=True); what is sent is a number, no graph
                gradient = gradient.detach()
            if self.hook is not None:
                view.copy_(gradient)
            else:
                torch.mul(gradient, self._scale, out=view)  # one pass, also when the gradient is the view
            if self._check_finite:  # now, while it is in the cache: NaN and infinities survive in a sum
                self._sums[slot] = view.sum(dtype=self._sum_dtype)
            parameter.grad = view  # frees backward's own tensor; undone by zero_grad(), redone here

    def start(self, group: ProcessGroup | None, spans: SpanWriter | None = None) -> None:
        """Begin to exchange the bucket, and to draw that; do not wait."""
        if self.hook is not None and self._check_finite:
            self._leave_out_not_finite()
        of_nccl = spans is not None and self.hook is None and needs_batches(self.flat.buffer, group)
        self._work = TimedWork(lambda: self._send(group), spans, of_nccl=of_nccl)

    def _send(self, group: ProcessGroup | None) -> Pending | None:
        if self.hook is None:
            work: dist.Work | None = dist.all_reduce(self.flat.buffer, group=group, async_op=True)
            return work
        return self.hook.start(GradientBucket(self.index, self.flat.buffer, self.views), group)

    def wait(self) -> None:
        """Wait until the buffer holds the mean."""
        assert self._work is not None, "a bucket is started before anything waits for it"
        self._work.wait()

    def nan_flag(self) -> torch.Tensor:
        """Return 0, or NaN if a gradient on this rank is not finite. It stays on the device: the CPU does not wait.

        Shapes: []
        """
        sums = [one for one in self._sums if one is not None]
        return torch.stack(sums).sum() * 0 if sums else self.flat.buffer.new_zeros(())

    def note_not_finite(self) -> None:
        """Enter which of this rank's gradients were not finite, now that the buffer holds the mean.

        A sum can overflow where no gradient did; then the mean is finite, and on every rank, since it is the same bits.
        """
        for slot in self._not_finite():
            self.statuses[slot] = NOT_FINITE

    def _leave_out_not_finite(self) -> None:
        # What a hook remembers between steps must not be spoiled by a step that is going to be refused.
        for slot in self._not_finite():
            self.statuses[slot] = NOT_FINITE
            self.views[slot].zero_()

    def _not_finite(self) -> list[int]:
        """Return the slots that have no other fault and whose view is not finite; the sums tell where to look."""
        sums = {slot: one for slot, one in enumerate(self._sums) if one is not None}
        if not sums:
            return []
        finite = torch.stack(list(sums.values())).isfinite().tolist()
        suspects = [slot for slot, fine in zip(sums, finite, strict=True) if not fine]
        return [
            slot for slot in suspects if self.statuses[slot] in (USED, UNUSED) and not self.views[slot].isfinite().all()
        ]

    def note_end(self) -> None:
        """Remember when the exchange was first seen to be over."""
        if self._work is not None:
            self._work.note_end()

    def mark(self) -> None:
        """Draw the bucket's exchange on the communication lane."""
        assert self._work is not None, "only what was started is drawn"
        name = f"{'all_reduce' if self.hook is None else 'exchange'} bucket {self.index}"
        self._work.mark(name, self.flat.num_bytes)
