"""Reference solutions of lesson 3: equal starts, then gradients averaged one by one, flat, in buckets, during backward.

The library's own versions, made fit for real models, are in `distlab.data_parallel`.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from distlab.data_parallel.steps import GradientBucket


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


def overlap(buckets: list[GradientBucket]) -> Callable[[], None]:
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
