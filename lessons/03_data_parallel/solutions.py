"""Reference solutions of lesson 3: equal starts; gradients averaged in four ways; micro-batches, samples and tokens.

The library's own versions, made fit for real models, are in `distlab.data_parallel`.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlab.data_parallel.steps import FlatBucket
from distlab.rng import derive_seed


def broadcast_module(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, in place."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def average_gradients(module: nn.Module) -> None:
    """Replace every parameter's gradient by its mean over all ranks, one all-reduce a parameter.

    A parameter without a gradient (None) on this rank counts as zeros. Frozen parameters are left alone.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def average_flat(module: nn.Module) -> None:
    """Do what average_gradients does, with a single all-reduce of one flat tensor."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    flat /= dist.get_world_size()
    dist.all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


def fill_buckets(sizes_bytes: list[int], bucket_bytes: int) -> list[list[int]]:
    """Put every parameter into a bucket, the last parameter first.

    A bucket is closed as soon as it holds bucket_bytes or more.

    Args:
        sizes_bytes: bytes of each parameter's gradient, in the order in which the module registered them.
        bucket_bytes: capacity of a bucket.

    Returns:
        The buckets in the order in which they fill, each a list of indices into sizes_bytes.
    """
    buckets = []
    members, num_bytes = [], 0
    for index in reversed(range(len(sizes_bytes))):
        members.append(index)
        num_bytes += sizes_bytes[index]
        if num_bytes >= bucket_bytes:
            buckets.append(members)
            members, num_bytes = [], 0
    return buckets + [members] if members else buckets


def overlap(buckets: list[FlatBucket]) -> Callable[[], None]:
    """Send each bucket during backward, as soon as its last gradient is there; return what to call after backward.

    `bucket.parameters` are its parameters, `bucket.start(None)` begins its all-reduce and does not wait,
    `bucket.finish()` waits and puts the mean into each parameter's gradient. All ranks start buckets in the order of
    the list. The returned function starts what is left (a parameter that was not used has no gradient), finishes all,
    and is ready for the next step.
    """
    missing = [len(bucket.parameters) for bucket in buckets]
    started = []

    def gradient_ready(index: int) -> None:
        missing[index] -= 1
        while len(started) < len(buckets) and missing[len(started)] == 0:
            buckets[len(started)].start(None)
            started.append(len(started))

    for index, bucket in enumerate(buckets):
        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: gradient_ready(index))

    def synchronize() -> None:
        for bucket in buckets[len(started) :]:
            bucket.start(None)
        for bucket in buckets:
            bucket.finish()
        started.clear()
        missing[:] = [len(bucket.parameters) for bucket in buckets]

    return synchronize


def average_in_hooks(module: nn.Module) -> None:
    """Make every backward pass of the module leave the mean over all ranks in each parameter's gradient.

    A hook on each parameter averages its gradient as soon as backward has written it.
    """

    def gradient_ready(parameter: nn.Parameter) -> None:
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(gradient_ready)


def accumulate(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    microbatches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    num_accumulated: int,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Make one update for every num_accumulated micro-batches, and send gradients once an update.

    An update is that of one batch made of its micro-batches. No gradient is left over afterwards.

    Args:
        model: torch's wrapper: backward averages gradients over ranks, but for what is inside `with model.no_sync():`.
        optimizer: of the model's parameters, whose gradients are None or zero.
        microbatches: inputs and targets, all of one size; num_accumulated divides their number.
        num_accumulated: micro-batches of one update.
        loss_fn: mean loss of outputs and targets.
    """
    for number, (inputs, targets) in enumerate(microbatches, start=1):
        is_last = number % num_accumulated == 0
        with nullcontext() if is_last else model.no_sync():
            loss = loss_fn(model(inputs), targets)
            (loss / num_accumulated).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def samples_at(position: int, batch_size: int, *, num_samples: int, seed: int, rank: int, world_size: int) -> list[int]:
    """Return this rank's samples of the batch that begins at a position.

    Every epoch shows each sample once, in an order of its own, and ends with what is left: its last batch may be
    smaller. A batch holds the same samples whatever the number of ranks. Nothing is remembered between calls.

    Args:
        position: samples that all ranks together have used since training began, over all epochs.
        batch_size: samples of a batch, of all ranks together.
        num_samples: samples in the data set.
        seed: a different seed, a different order.
        rank: which rank asks.
        world_size: number of ranks; their shares of a batch differ by one sample at most.
    """
    epoch, start = divmod(position, num_samples)
    shuffle = torch.Generator().manual_seed(derive_seed(seed, 0, f"epoch {epoch}"))
    order = torch.randperm(num_samples, generator=shuffle)
    return order[start : start + batch_size][rank::world_size].tolist()


def token_weights(num_tokens: list[int]) -> list[float]:
    """Return what to multiply each micro-batch's mean loss by, so that each token of all ranks counts the same.

    A rank adds up the gradients of its micro-batches, then ranks average. With these weights the result is the
    gradient of the mean loss over all tokens of all ranks.

    Args:
        num_tokens: tokens in each of this rank's micro-batches; empty on a rank that has run out of data.
    """
    total = torch.tensor(sum(num_tokens))
    dist.all_reduce(total)
    return [count * dist.get_world_size() / int(total) for count in num_tokens]
