"""DataParallel: the top of the ladder, made fit for real models.

It adds to `Overlapped`:

- After the first copy gradients *are* views of the buckets: no unpacking, no second copy in memory.
- Ranks prove at the start that they hold the same model.
- Micro-batches can be accumulated.
- What goes wrong with a gradient on one rank (none, a sparse one, a second one, NaN) is named on every rank. No rank
  hangs.

A backward pass hands one gradient after the other to a `Bucket` (`take`). When all are there, or at the end of the
step, the bucket is sent (`start`), and later its buffer holds the mean over ranks (`wait`). It travels by one
all-reduce, or as a `GradientHook` decides. `SendInBackward` (`distlab.blocks.gradients.flat_gradients`) does this for
all buckets; `distlab.blocks.gradients.gradient_status` says how ranks tell each other what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.flat import FlatBuffer
from distlab.blocks.gradient_hook import GradientBucket, GradientHook, Pending
from distlab.blocks.gradients.flat_gradients import HALF, GradientSlots, SendInBackward, TimedWork, refuse_second
from distlab.blocks.gradients.gradient_status import (
    NOT_FINITE,
    ON_THEIR_WAY,
    SPARSE,
    TOUCHED,
    UNUSED,
    USED,
    Reports,
    gather_reports,
)
from distlab.blocks.modules.moved import NotCopied, absent
from distlab.blocks.replicate import Registered, agree_on_build, every_parameter
from distlab.comm import device
from distlab.comm.p2p import can_move_cpu_tensors, needs_batches
from distlab.comm.shared_memory.group import zeros
from distlab.data_parallel.buffers import SyncBatchNorm
from distlab.data_parallel.steps import broadcast_parameters, in_buckets, trainable
from distlab.trace import SpanWriter

CACHE_LINE_BYTES = 64
WAYS_WITH_UNUSED = ("error", "zeros")


class Bucket(GradientSlots):
    """One buffer, and a view of it for each parameter; all ranks of the group make a bucket together.

    With an all-reduce, gradients are divided by the number of ranks as they are copied in. The buffer then ends in
    `num_flags` further elements, and is rounded up to a cache line per rank. A hook gets them as they are, and no more.

    Args:
        index: its place in the order in which buckets are sent, for the names of spans.
        parameters: of one dtype, in the order of their gradients.
        group: the replicas.
        num_flags: further elements at its end.
        hook: how it travels; None is one all-reduce.
        check_finite: look for NaN and infinity while a gradient is copied in.

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
        self.marks = [absent(view, ON_THEIR_WAY) for view in self.views]
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
        """Copy a parameter's gradient to its place, which a mark stands for until the mean is there; or zeros."""
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
            parameter.grad, self.comes[slot] = self.marks[slot], True  # frees backward's own tensor

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
        """Wait until the buffer holds the mean; gradients are views of it now."""
        assert self._work is not None, "a bucket is started before anything waits for it"
        self._work.wait()
        for parameter, view, comes in zip(self.parameters, self.views, self.comes, strict=True):
            if comes:
                parameter.grad = view

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


class DataParallel(NotCopied):
    """Average a module's gradients over a group while backward still computes them.

    Call the module as always, then `synchronize()` between backward and the optimizer:

        replicas = DataParallel(module)
        loss_fn(module(inputs), targets).backward()
        replicas.synchronize()
        optimizer.step()

    The group's first rank gives its parameters and buffers to all at construction; after that buffers (running
    statistics) go their own way (see `broadcast_buffers`, `convert_sync_batchnorm`). Gradient buckets keep one order
    forever, so a resumed run repeats the uninterrupted one bit for bit. Every bucket but the last is sent during
    backward; the last is full when backward ends, and waits for `synchronize()`: its flag speaks for the whole step.

    Until then gradients refuse to be used.

    Args:
        module: the model; frozen parameters are left alone, a tied parameter is sent once.
        group: the replicas; None is all ranks.
        bucket_bytes: capacity of a bucket.
        first_bucket_bytes: capacity of the first, small so that sending starts early.
        unused: what to do when a parameter got no gradient: "error" names it on every rank; "zeros" does what one
            process does with the whole batch: ranks that did not use it count as zeros, and where no rank used it the
            gradient stays as it was (None).
        spans: marks each bucket's way on the communication lane; its end is seen when the next hook or wait looks.
        hook: how a bucket travels; None is one all-reduce.
        check_finite: refuse NaN and infinite gradients, by name, instead of giving them to every rank.

    Attributes:
        step: number of the next `synchronize()`, from 0, for the text of errors; set it in a resumed run.

    Cost: one all-reduce per bucket, of its gradient bytes (the last: and one element), rounded up to a cache line per
        rank (64 n bytes); in a step with something to tell P + 1 bytes per rank more. With a hook: what the hook sends,
        and one all-reduce of one element. At construction agreement and a broadcast.
        On a GPU the host waits once in a step, to read the last bucket's flag. With check_finite=False, and gloo next
        to nccl, it never waits for the GPU: the flag is then a CPU tensor's all-reduce of 4 bytes.
    Error: as one process up to the order of additions; repeats bit for bit.

    Raises:
        ValueError: on every rank: ranks hold different models or options, no parameter requires a
            gradient, a different technique averages it, or a SyncBatchNorm shares the group while ranks may leave
            parameters unused.

    Source: Li et al. 2020, PyTorch Distributed, section 3.2. Buckets here are fixed; there they are rebuilt in the
        order of the first backward pass. The flag replaces a bitmap that is reduced each step.
    """

    instead = (
        "its hooks are on this module, and a copy of that has none. Save or copy the module, and build a DataParallel "
        "of the copy"
    )

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None = None,
        *,
        bucket_bytes: int = 25_000_000,
        first_bucket_bytes: int = 1_000_000,
        unused: str = "error",
        spans: SpanWriter | None = None,
        hook: GradientHook | None = None,
        check_finite: bool = True,
    ) -> None:
        self.module = module
        self.group = group
        self.unused = unused
        self.spans = spans
        self.hook = hook
        self.step = 0
        self._rank = dist.get_rank(group)
        self._names = {parameter: name for name, parameter in every_parameter(module)}
        options = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes, "unused": unused}
        options |= {"hook": type(hook).__name__, "check_finite": check_finite}
        agree_on_build(every_parameter(module), group, **options)
        if unused not in WAYS_WITH_UNUSED:
            raise ValueError(f"unused is {unused!r}; choose one of {', '.join(WAYS_WITH_UNUSED)}")
        self._refuse_crossing_calls()
        parameters = trainable(self._names)
        if not parameters:
            raise ValueError("no parameter of the module requires a gradient; there is nothing to average")
        refuse_second(parameters)
        self._registered = Registered(module, "DataParallel")
        members = in_buckets(parameters, bucket_bytes, first_bucket_bytes)
        # What the host knows by itself can be told without asking the GPU, which then never has to be waited for.
        on_host = device.is_gpu(parameters[0]) and can_move_cpu_tensors(group) and not (check_finite and hook is None)
        self._flag_apart = hook is not None or on_host
        self._buckets = [
            Bucket(
                index,
                same,
                group,
                num_flags=int(not self._flag_apart and index == len(members) - 1),
                hook=hook,
                check_finite=check_finite,
            )
            for index, same in enumerate(members)
        ]
        self._flag = self._make_flag(on_host)
        broadcast_parameters(module, group)
        self._accumulating = False
        self._sending = SendInBackward(
            self._buckets, lambda bucket: bucket.start(group, spans), self._on_gradient, num_early=len(members) - 1
        )

    @property
    def num_buckets(self) -> int:
        """Exchanges of a bucket in a step."""
        return len(self._buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets: what a step's all-reduces carry, or what a hook is given."""
        return sum(bucket.flat.num_bytes for bucket in self._buckets)

    def _make_flag(self, on_host: bool) -> Tensor:
        """Return the element that says whether some rank has something to tell."""
        last = self._buckets[-1]
        if on_host:
            return device.pinned_empty((), torch.float32)
        return last.flat.buffer.new_zeros((), dtype=torch.float32) if self._flag_apart else last.flags[0]

    def _on_gradient(self, bucket: Bucket, slot: int) -> bool:
        if not bucket.note(slot):
            self.synchronize()  # raises here and, at their synchronize(), on the other ranks
        self._note_ends()
        return not self._accumulating

    def _note_ends(self) -> None:
        if self.spans is not None:
            for bucket in self._buckets:
                bucket.note_end()

    def zero_grad(self) -> None:
        """Forget the gradients; as good as the optimizer's own `zero_grad()`.

        Backward's first gradient is then written to its bucket and divided in one pass, with nothing to fill and add.
        """
        for parameter in self._names:
            parameter.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: gradients of backward passes in this block stay on the rank and are averaged by the next.

        Put forward and backward inside. Only where backward runs counts here; torch's own counts where forward ran,
        and a program with forward outside silently sends every micro-batch there.
        """
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def synchronize(self) -> None:
        """Make every gradient the mean over the group.

        Ranks may have used different parameters: what a rank misses is sent as zeros (or as what it accumulated), so no
        rank waits for a bucket that never comes.

        Raises:
            NotFiniteError: a gradient was NaN or infinite on some rank (a RuntimeError; check_finite=True).
            RuntimeError: a parameter got no gradient on some rank (unused="error"), or a sparse one, or a second one
                before this call; gradients were replaced or forgotten before it; or a parameter was added since this
                was built, or was frozen then. Every error is raised on every rank; gradients then hold nothing of
                use: zero them to go on.
        """
        complaints = self._registered.complaints()
        complaints += [TOUCHED] if any(bucket.is_touched for bucket in self._buckets) else []
        for bucket in self._buckets:
            bucket.take_rest()
        try:
            self._exchange(complaints)
            # Not zero, or NaN: some rank has something to tell.
            error = self._hear(complaints) if bool(self._flag.item()) else None
        finally:
            self.step += 1
            self._sending.reset()
            for bucket in self._buckets:
                bucket.reset()
        if error is not None:
            raise error

    @torch.no_grad()
    def _exchange(self, complaints: list[str]) -> None:
        """Send what is not yet on its way, and wait for all."""
        work: dist.Work | None = None
        if not self._flag_apart:
            self._raise_flag(complaints)
            self._sending.start_full()
        else:
            self._sending.start_full()
            self._raise_flag(complaints)
            work = dist.all_reduce(self._flag, group=self.group, async_op=True)
        for bucket in self._buckets:
            bucket.wait()
            if self.spans is not None:
                self._note_ends()
                bucket.mark()
        if work is not None:
            work.wait()

    def _raise_flag(self, complaints: list[str]) -> None:
        self._flag.fill_(float(bool(complaints) or any(any(bucket.statuses) for bucket in self._buckets)))
        if not self._flag_apart:
            for bucket in self._buckets:
                self._flag.add_(bucket.nan_flag().to(self._flag))

    def _hear(self, complaints: list[str]) -> RuntimeError | None:
        """Exchange all ranks' reports on gradients; return the error that every rank must raise, or None."""
        for bucket in self._buckets:
            bucket.note_not_finite()
        statuses = [status for bucket in self._buckets for status in bucket.statuses]
        reports = gather_reports(statuses, complaints, self.group)
        self._hand_out(reports)
        names = [self._names[parameter] for bucket in self._buckets for parameter in bucket.parameters]
        error = reports.error(names, unused=self.unused, step=self.step)
        return None if error is None else type(error)(f"rank {self._rank}: {error}")

    def _hand_out(self, reports: Reports) -> None:
        """Give a gradient to parameters that this rank did not use and a different rank did."""
        index = 0
        for bucket in self._buckets:
            for slot, parameter in enumerate(bucket.parameters):
                if bucket.statuses[slot] == UNUSED and any(row[index] != UNUSED for row in reports.statuses):
                    parameter.grad = bucket.views[slot]
                index += 1

    def _refuse_crossing_calls(self) -> None:
        """Ranks that take different branches call a norm's all-reduce and a bucket's in different orders."""
        mine = dist.group.WORLD if self.group is None else self.group
        for name, one in self.module.named_modules() if self.unused == "zeros" else ():
            if isinstance(one, SyncBatchNorm) and (dist.group.WORLD if one.group is None else one.group) is mine:
                raise ValueError(
                    f'{name} sums over the group of the buckets, and unused="zeros" lets ranks take different '
                    "branches: their calls could cross. Give the norms a group of their own: "
                    "convert_sync_batchnorm(module, dist.new_group())"
                )

    def close(self) -> None:
        """Take the hooks off the module; gradients stay where they are."""
        self._sending.close()
