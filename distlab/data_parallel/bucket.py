"""Bucket: gradients that travel together, as views of one buffer.

A backward pass hands over one gradient after the other (`take`); when all are there, or at the end of the step, the
bucket goes on its way (`start`), and later its buffer holds the mean over ranks (`wait`). How it travels is either one
all-reduce or a `GradientHook`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.data_parallel.census import NOT_FINITE, SPARSE, UNUSED, USED
from distlab.flat import FlatBuffer
from distlab.gradient_hook import GradientBucket, GradientHook, Pending
from distlab.trace import SpanWriter

CACHE_LINE_BYTES = 64
HALF = (torch.float16, torch.bfloat16)


class Bucket:
    """One buffer, a view of it for each parameter, and what is known of each parameter's gradient in this step.

    With an all-reduce gradients are divided by the number of ranks as they are copied in, and the buffer ends in
    `num_flags` further elements and is rounded up to a cache line a rank. A hook gets them as they are, and no more.

    Attributes:
        codes: what became of each parameter's gradient: see `distlab.data_parallel.census`.
        packed: its gradient lies in the buffer.
        flags: the further elements, for whoever has more to tell the other ranks.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[nn.Parameter],
        num_ranks: int,
        *,
        num_flags: int = 0,
        hook: GradientHook | None = None,
        check_finite: bool = True,
    ) -> None:
        self.index = index
        self.parameters = parameters
        self.hook = hook
        flags = [parameters[0].detach().new_empty(()) for _ in range(num_flags)]
        self.flat = (
            FlatBuffer([*parameters, *flags], multiple_of=CACHE_LINE_BYTES * num_ranks)
            if hook is None
            else FlatBuffer(parameters)
        )
        self.views = self.flat.views[: len(parameters)]
        self.flags = self.flat.views[len(parameters) :]
        self._scale = 1 / num_ranks
        self._check_finite = check_finite
        self._sum_dtype = torch.float32 if self.flat.buffer.dtype in HALF else None  # a sum may exceed float16's range
        self.reset()

    def reset(self) -> None:
        """Be ready for the next step."""
        self.codes = [UNUSED] * len(self.parameters)
        self.packed = [False] * len(self.parameters)
        self.num_packed = 0
        self._sums: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._pending: Pending | None = None
        self.start_ns = 0
        self.end_ns = 0

    @property
    def full(self) -> bool:
        """Whether every gradient lies in the buffer."""
        return self.num_packed == len(self.parameters)

    def take(self, slot: int) -> None:
        """Copy a parameter's gradient to its place and make that place the gradient; where there is none, zeros."""
        parameter, view = self.parameters[slot], self.views[slot]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient.layout is not torch.strided:
            self.codes[slot] = SPARSE
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
        self.packed[slot] = True
        self.num_packed += 1

    def take_rest(self) -> None:
        """Take what backward did not bring: gradients accumulated earlier, or none."""
        if not self.full:
            for slot, packed in enumerate(self.packed):
                if not packed:
                    self.take(slot)

    def start(self, group: ProcessGroup | None) -> None:
        """Begin to exchange the bucket; do not wait."""
        if self.hook is not None and self._check_finite:
            self._leave_out_not_finite()
        self.start_ns = time.monotonic_ns()
        if self.hook is None:
            self._pending = dist.all_reduce(self.flat.buffer, group=group, async_op=True)
        else:
            self._pending = self.hook.start(GradientBucket(self.index, self.flat.buffer, self.views), group)

    def wait(self) -> None:
        """Wait until the buffer holds the mean."""
        assert self._pending is not None
        self._pending.wait()

    def poison(self) -> torch.Tensor:
        """Return 0, or NaN when a gradient of this rank is not finite: no host waits for a device to learn which."""
        sums = [one for one in self._sums if one is not None]
        return torch.stack(sums).sum() * 0 if sums else self.flat.buffer.new_zeros(())

    def note_not_finite(self) -> None:
        """Enter which of this rank's gradients were not finite, now that the buffer holds the mean.

        A sum can overflow where no gradient did; then the mean is finite, and on every rank, since it is the same bits.
        """
        for slot in self._suspects():
            if not self.views[slot].isfinite().all():
                self.codes[slot] = NOT_FINITE

    def _leave_out_not_finite(self) -> None:
        # What a hook remembers between steps must not be spoiled by a step that is going to be refused.
        for slot in self._suspects():
            if not self.views[slot].isfinite().all():
                self.codes[slot] = NOT_FINITE
                self.views[slot].zero_()

    def _suspects(self) -> list[int]:
        slots = [slot for slot, one in enumerate(self._sums) if one is not None]
        if not slots:
            return []
        finite = torch.stack([one for one in self._sums if one is not None]).isfinite().tolist()
        return [
            slot for slot, fine in zip(slots, finite, strict=True) if not fine and self.codes[slot] in (USED, UNUSED)
        ]

    def note_end(self) -> None:
        """Remember when an all-reduce was first seen to be over; of a hook only its own wait tells."""
        if self.end_ns == 0 and isinstance(self._pending, dist.Work) and self._pending.is_completed():
            self.end_ns = time.monotonic_ns()

    def mark(self, spans: SpanWriter) -> None:
        """Draw the bucket's way on the communication lane."""
        name = f"{'all_reduce' if self.hook is None else 'exchange'} bucket {self.index}"
        end_ns = self.end_ns or time.monotonic_ns()
        num_bytes = self.flat.num_bytes
        spans.add(name, "all_reduce", self.start_ns, end_ns, lane="communication", num_bytes=num_bytes)
