"""Data parallelism as a ladder: four ways to average gradients, the simplest first, each faster than the one before.

Every rank has the whole model and its own part of the batch. After backward each rank holds the gradient of its own
part; the mean over ranks is the gradient of the whole batch. So all ranks average gradients, apply the same update, and
stay equal forever, provided that they started equal (`broadcast_parameters`).

1. `average_per_parameter`: one all-reduce per parameter. Correct; pays one latency for each.
2. `average_flat`: one all-reduce for all. One latency; copies everything, and nothing is sent while it copies.
3. `Bucketed`: some all-reduces of some megabytes. Packs one bucket while a different one is on the wire.
4. `Overlapped`: the same buckets, sent *during* backward as soon as their gradients exist.

`distlab.data_parallel.bucketed.DataParallel` is the fourth with everything that real models need. This file keeps its
own small version of what `gradients.flat_gradients` does for the whole library, so that one screen shows all of it.

All four send a mean, not a sum: a sum makes the learning rate grow with the number of ranks. They divide before the
all-reduce and not after, so that half-precision gradients cannot overflow while they are summed.

Symbols: n ranks, P parameters that want gradients, G bytes of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.flat import FlatBuffer, same_kind
from distlab.blocks.replicate import broadcast_flat, every_parameter
from distlab.plan import assign_buckets
from distlab.trace import SpanWriter


def broadcast_parameters(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Give every rank the parameters and buffers of the group's first rank, by broadcasts of flat buffers.

    Cost: one broadcast per dtype, of that dtype's parameter and buffer bytes.
    """
    broadcast_flat([*(parameter for _, parameter in every_parameter(module)), *module.buffers()], group)


def average_per_parameter(parameters: Iterable[nn.Parameter], group: ProcessGroup | None = None) -> None:
    """Average each gradient with an all-reduce of its own.

    A parameter that this rank did not use counts as zeros, so that all ranks make the same calls.

    Cost: P all-reduces, together of G bytes.
    """
    num_ranks = dist.get_world_size(group)
    for parameter in trainable(parameters):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        gradient.div_(num_ranks)
        dist.all_reduce(gradient, group=group)
        parameter.grad = gradient


def average_flat(parameters: Iterable[nn.Parameter], group: ProcessGroup | None = None) -> None:
    """Average all gradients with one all-reduce of one flat buffer.

    Cost: one all-reduce per dtype, together of G bytes; every gradient is copied in and out.
    """
    for same in same_kind(trainable(parameters)):
        bucket = FlatBucket(same)
        bucket.start(group)
        bucket.finish()


class FlatBucket:
    """Gradients that travel together: pack them, send them, unpack the mean."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = FlatBuffer(parameters)
        self._work: dist.Work | None = None

    def start(self, group: ProcessGroup | None) -> None:
        """Copy the gradients in and begin the all-reduce; do not wait."""
        self.flat.pack([parameter.grad for parameter in self.parameters])
        self.flat.buffer.div_(dist.get_world_size(group))
        self._work = dist.all_reduce(self.flat.buffer, group=group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the all-reduce and copy the mean out.

        Raises:
            RuntimeError: it was not started since the last finish.
        """
        if self._work is None:
            sizes = [tuple(parameter.shape) for parameter in self.parameters]
            raise RuntimeError(
                f"finish() of a bucket that was not started in this step; its parameters have the shapes {sizes}"
            )
        self._work.wait()
        self._work = None
        for parameter, mean in zip(self.parameters, self.flat.views, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(mean)
            elif parameter.requires_grad:  # this rank did not use it; and it was not frozen since
                parameter.grad = mean.clone()


class Bucketed:
    """Average gradients in buckets after backward.

    Buckets hold the parameters in reverse order, since backward produces the last layer's gradients first. Here that
    does not matter yet; on the next rung it does.

    Cost: one all-reduce per bucket, about G / bucket_bytes, together of G bytes.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None, bucket_bytes: int = 25_000_000) -> None:
        self.group = group
        parameters = trainable(parameter for _, parameter in every_parameter(module))
        self.buckets = [FlatBucket(members) for members in in_buckets(parameters, bucket_bytes)]

    def synchronize(self) -> None:
        """Average the gradients: bucket 1 is packed while bucket 0 travels."""
        for bucket in self.buckets:
            bucket.start(self.group)
        for bucket in self.buckets:
            bucket.finish()


class Overlapped(Bucketed):
    """Send each bucket during backward, as soon as its last gradient is there.

    A hook on each parameter counts the gradients of its bucket. Buckets are started in order even when a later one is
    full first: all ranks must call their collectives in one order, and ranks may run their hooks in different ones.

    Cost: as `Bucketed`; what backward hides costs no time.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None, bucket_bytes: int = 25_000_000) -> None:
        super().__init__(module, group, bucket_bytes)
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._num_started = 0
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._count(index))

    def _count(self, index: int) -> None:
        self._missing[index] -= 1
        while self._num_started < len(self.buckets) and self._missing[self._num_started] == 0:
            self._start_next()

    def _start_next(self) -> None:
        self.buckets[self._num_started].start(self.group)
        self._num_started += 1

    def synchronize(self) -> None:
        """Start the buckets that wait for a parameter that was not used, then wait for all."""
        while self._num_started < len(self.buckets):
            self._start_next()
        for bucket in self.buckets:
            bucket.finish()
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._num_started = 0


def trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def in_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, first_bucket_bytes: int | None = None
) -> list[list[nn.Parameter]]:
    """Split parameters, last first, into buckets of one dtype on one device; see `distlab.plan.assign_buckets`."""
    buckets = []
    for same in same_kind(reversed(parameters)):
        same = same[::-1]
        sizes = [parameter.numel() * parameter.element_size() for parameter in same]
        planned = assign_buckets(sizes, bucket_bytes, first_bucket_bytes)
        buckets += [[same[index] for index in bucket.parameters] for bucket in planned]
    return buckets


def loss_weight(num_local: int, num_total: int, num_ranks: int) -> float:
    """Return what to multiply a rank's mean loss by when ranks have unequal shares of the batch.

    Ranks average their gradients with equal weight, so a rank with fewer samples would count each of them for more.
    With this weight the average is the mean over all samples; with equal shares it is 1. When gradients are
    accumulated, each micro-batch's mean loss gets the weight of its own samples (or tokens that count).
    """
    return num_local * num_ranks / num_total


def train_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    synchronize: Callable[[], None] | None = None,
    weight: float = 1.0,
    spans: SpanWriter | None = None,
) -> Tensor:
    """Run one update and return this rank's mean loss.

    Shapes: batch as the module and `loss_fn` want it -> []
    Cost: what `synchronize` sends.

    Args:
        module: the model.
        optimizer: of the model's parameters.
        batch: this rank's inputs, and the targets that `loss_fn` compares the outputs to.
        loss_fn: mean loss of outputs and targets.
        synchronize: averages the gradients over ranks; None trains alone.
        weight: this rank's `loss_weight`.
        spans: marks "forward", "backward", "synchronize" and "optimizer" on the compute lane.
    """
    inputs, targets = batch
    optimizer.zero_grad()
    with _span(spans, "forward", "F"):
        loss = loss_fn(module(inputs), targets)
    with _span(spans, "backward", "B"):
        (loss * weight if weight != 1.0 else loss).backward()
    if synchronize is not None:
        with _span(spans, "synchronize", "wait"):
            synchronize()
    with _span(spans, "optimizer", "optimizer"):
        optimizer.step()
    return loss.detach()


def _span(spans: SpanWriter | None, name: str, kind: str) -> AbstractContextManager[Any]:
    return nullcontext() if spans is None else spans.span(name, kind=kind, lane="compute")
