"""DataParallel: the top of the ladder, made fit for real models.

What it adds to `Overlapped`: gradients *are* views of the buckets after the first copy (no unpacking, no second copy
in memory), ranks prove at the start that they hold the same model, micro-batches can be accumulated, and a parameter
that some rank did not use is found and named, or counted as zeros, instead of hanging the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.comm.agree import agree
from distlab.data_parallel.steps import broadcast_parameters, in_buckets, wanting_gradients
from distlab.flat import FlatBuffer
from distlab.trace import SpanWriter

UNUSED = ("error", "zeros")
CACHE_LINE_BYTES = 64


class _Bucket:
    """Gradients that travel together, as views of one buffer.

    The buffer ends in one more element, the flag: not zero when this rank misses a gradient. It is summed with the
    gradients, so all ranks learn that one of them misses something and pay no call of its own for it.
    """

    def __init__(self, index: int, parameters: list[nn.Parameter], num_ranks: int) -> None:
        self.index = index
        self.parameters = parameters
        flag = parameters[0].detach().new_empty(())
        self.flat = FlatBuffer([*parameters, flag], multiple_of=CACHE_LINE_BYTES * num_ranks)
        *self.views, self.flag = self.flat.views
        self.scale = 1 / num_ranks
        self.used = [False] * len(parameters)  # a backward pass reached it since the last synchronize
        self.packed = [False] * len(parameters)  # its gradient lies in the buffer, divided
        self.num_packed = 0
        self.work: dist.Work | None = None
        self.start_ns = 0
        self.end_ns = 0

    @property
    def full(self) -> bool:
        return self.num_packed == len(self.parameters)

    def pack(self, slot: int, gradient: torch.Tensor | None) -> None:
        """Write gradient / num_ranks into the buffer (one pass over memory, also when the gradient is the view)."""
        if gradient is None:
            self.views[slot].zero_()
        elif gradient.requires_grad:  # backward(create_graph=True); what is sent is a number, no graph
            torch.mul(gradient.detach(), self.scale, out=self.views[slot])
        else:
            torch.mul(gradient, self.scale, out=self.views[slot])  # as torch DDP: a product is faster
        self.packed[slot] = True
        self.num_packed += 1

    def start(self, group: ProcessGroup | None) -> None:
        self.flag.fill_(float(not all(self.used)))
        self.start_ns = time.monotonic_ns()
        self.end_ns = 0
        self.work = dist.all_reduce(self.flat.buffer, group=group, async_op=True)

    def reset(self) -> None:
        self.used = [False] * len(self.parameters)
        self.packed = [False] * len(self.parameters)
        self.num_packed = 0
        self.work = None


class DataParallel:
    """Average a module's gradients over a group while backward still computes them.

    Call the module as always, then `synchronize()` between backward and the optimizer:

        replicas = DataParallel(module)
        loss_fn(module(inputs), targets).backward()
        replicas.synchronize()
        optimizer.step()

    The group's first rank gives its parameters and buffers to all at construction; after that buffers (running
    statistics) go their own way. Gradient buckets keep one order for ever, so a resumed run repeats the uninterrupted
    one bit for bit.

    Args:
        module: the model; frozen parameters are left alone, a tied parameter is sent once.
        group: the replicas; None is all ranks.
        bucket_bytes: capacity of a bucket.
        first_bucket_bytes: capacity of the first, small so that sending starts early.
        unused: what to do when a parameter got no gradient: "error" names it on every rank; "zeros" does what one
            process does with the whole batch: ranks that did not use it count as zeros, and where no rank used it the
            gradient stays as it was (None).
        spans: marks each bucket's way on the communication lane; its end is seen when the next hook or wait looks.

    Cost: one all-reduce a bucket, of its gradient bytes and one element, rounded up to a cache line a rank (64 n
        bytes); at construction agreement and a broadcast.
    Error: as one process up to the order of additions; repeats bit for bit.

    Raises:
        ValueError: ranks hold different models or options, or nothing wants a gradient.

    Source: Li et al. 2020, PyTorch Distributed, section 3.2. Buckets here are fixed; there they are rebuilt in the
        order of the first backward pass. The flag replaces a bitmap that is reduced each step.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None = None,
        *,
        bucket_bytes: int = 25_000_000,
        first_bucket_bytes: int = 1_000_000,
        unused: str = "error",
        spans: SpanWriter | None = None,
    ) -> None:
        if unused not in UNUSED:
            raise ValueError(f"unused is {unused!r}; choose one of {', '.join(UNUSED)}")
        self.module = module
        self.group = group
        self.unused = unused
        self.spans = spans
        self._rank = dist.get_rank(group)
        self._num_ranks = dist.get_world_size(group)
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        facts = [f"{name} {list(p.shape)} {p.dtype} {p.requires_grad}" for p, name in self._names.items()]
        agree(facts, group, what="parameters (name, shape, dtype, wants a gradient)")
        agree([bucket_bytes, first_bucket_bytes, unused], group, what="bucket_bytes, first_bucket_bytes and unused")
        parameters = wanting_gradients(self._names)
        if not parameters:
            raise ValueError("no parameter of the module wants a gradient; there is nothing to average")
        self._frozen = [parameter for parameter in self._names if not parameter.requires_grad]
        members = in_buckets(parameters, bucket_bytes, first_bucket_bytes)
        self._buckets = [_Bucket(index, same, self._num_ranks) for index, same in enumerate(members)]
        broadcast_parameters(module, group)
        self._num_started = 0
        self._accumulating = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))
            for bucket in self._buckets
            for slot, parameter in enumerate(bucket.parameters)
        ]

    @property
    def num_buckets(self) -> int:
        """All-reduces in a step."""
        return len(self._buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes that a step's all-reduces carry: each bucket's gradients and one element, rounded up to 64 n bytes."""
        return sum(bucket.flat.num_bytes for bucket in self._buckets)

    def _hook(self, bucket: _Bucket, slot: int) -> Callable[[nn.Parameter], None]:
        def gradient_ready(parameter: nn.Parameter) -> None:
            if self._accumulating:
                bucket.used[slot] = True
                return
            if bucket.packed[slot]:
                raise RuntimeError(
                    f"rank {self._rank}: {self._names[parameter]} got a second gradient before synchronize(); call "
                    "synchronize() after each backward, or run all but the last backward in `with no_sync():`"
                )
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                self._check_dense(parameter)
            bucket.used[slot] = True
            bucket.pack(slot, gradient)
            parameter.grad = bucket.views[slot]  # frees backward's own tensor; undone by zero_grad(), redone here
            if bucket.full or self.spans is not None:
                self._start_full()

        return gradient_ready

    def _check_dense(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ValueError(
                f"rank {self._rank}: {self._names[parameter]} has a sparse gradient, buckets hold dense ones; "
                "build the layer with sparse=False"
            )

    def _start_full(self) -> None:
        # In order, even when a later bucket is full first: all ranks must send in one order.
        while self._num_started < len(self._buckets) and self._buckets[self._num_started].full:
            self._buckets[self._num_started].start(self.group)
            self._num_started += 1
        if self.spans is not None:
            self._note_ends()

    def _note_ends(self) -> None:
        for bucket in self._buckets[: self._num_started]:
            if bucket.end_ns == 0 and bucket.work is not None and bucket.work.is_completed():
                bucket.end_ns = time.monotonic_ns()

    def zero_grad(self) -> None:
        """Forget the gradients; as good as the optimizer's own `zero_grad()`.

        Backward's first gradient is then written to its bucket and divided in one pass, with nothing to fill and add.
        """
        for parameter in self._names:
            parameter.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: gradients of backward passes in this block stay on the rank and are averaged by the next."""
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
            RuntimeError: on every rank: a parameter got no gradient on some rank (unused="error"), or one that was
                frozen at construction now wants a gradient.
        """
        thawed = [self._names[parameter] for parameter in self._frozen if parameter.requires_grad]
        for bucket in self._buckets:
            for slot, parameter in enumerate(bucket.parameters if not bucket.full else ()):
                if not bucket.packed[slot]:
                    self._check_dense(parameter)
                    bucket.pack(slot, parameter.grad)
                    if parameter.grad is not None:  # accumulated under no_sync
                        parameter.grad = bucket.views[slot]
        self._start_full()
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            if self.spans is not None:
                self._note_ends()
                self._mark(bucket)
        try:
            self._hand_out(self._exchange_used())
        finally:
            self._num_started = 0
            for bucket in self._buckets:
                bucket.reset()
        if thawed:
            raise RuntimeError(
                f"rank {self._rank}: {', '.join(thawed)} was frozen when DataParallel was built and wants a gradient "
                "now, which is not averaged; close() this one and build another"
            )

    def _mark(self, bucket: _Bucket) -> None:
        assert self.spans is not None
        end_ns = bucket.end_ns or time.monotonic_ns()
        self.spans.add(
            f"all_reduce bucket {bucket.index}",
            "all_reduce",
            bucket.start_ns,
            end_ns,
            lane="communication",
            num_bytes=bucket.flat.num_bytes,
        )

    def _exchange_used(self) -> list[list[bool]] | None:
        """Return which rank used which parameter, or None when every rank used all: the sum of the flags says so."""
        if not any(bucket.flag.item() for bucket in self._buckets):
            return None
        used = torch.tensor([flag for bucket in self._buckets for flag in bucket.used], dtype=torch.uint8)
        used = used.to(self._buckets[0].flat.buffer.device)
        gathered = [torch.empty_like(used) for _ in range(self._num_ranks)]
        dist.all_gather(gathered, used, group=self.group)
        return [[bool(flag) for flag in row.tolist()] for row in gathered]

    def _hand_out(self, used: list[list[bool]] | None) -> None:
        if used is None:  # each gradient is the view already: its hook, or synchronize, made it so
            return
        parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        views = [view for bucket in self._buckets for view in bucket.views]
        missing = []
        for index, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
            without = [rank for rank, row in enumerate(used) if not row[index]]
            if without:
                missing.append(f"{self._names[parameter]} (rank {', '.join(map(str, without))})")
            if len(without) < self._num_ranks or parameter.grad is not None:
                parameter.grad = view
        if missing and self.unused == "error":
            raise RuntimeError(
                f"rank {self._rank}: {len(missing)} parameters got no gradient on some rank of the group: "
                f"{'; '.join(missing)}. Use them in the loss on every rank, freeze them with requires_grad_(False), or "
                'pass unused="zeros"'
            )

    def close(self) -> None:
        """Take the hooks off the module; gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
