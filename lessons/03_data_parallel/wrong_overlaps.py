"""Wrong versions of buckets, of overlap and of hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from distlab.data_parallel.steps import FlatBucket


def buckets_from_the_front(sizes_bytes: list[int], bucket_bytes: int) -> list[list[int]]:
    """Begin with the first parameter."""
    buckets, members, num_bytes = [], [], 0
    for index in range(len(sizes_bytes)):
        members.append(index)
        num_bytes += sizes_bytes[index]
        if num_bytes >= bucket_bytes:
            buckets.append(members)
            members, num_bytes = [], 0
    return [*buckets, members] if members else buckets


def buckets_without_the_last(sizes_bytes: list[int], bucket_bytes: int) -> list[list[int]]:
    """Lose the bucket that is open at the end."""
    buckets, members, num_bytes = [], [], 0
    for index in reversed(range(len(sizes_bytes))):
        members.append(index)
        num_bytes += sizes_bytes[index]
        if num_bytes >= bucket_bytes:
            buckets.append(members)
            members, num_bytes = [], 0
    return buckets


def buckets_that_overflow(sizes_bytes: list[int], bucket_bytes: int) -> list[list[int]]:
    """Close only above the capacity."""
    buckets, members, num_bytes = [], [], 0
    for index in reversed(range(len(sizes_bytes))):
        members.append(index)
        num_bytes += sizes_bytes[index]
        if num_bytes > bucket_bytes:
            buckets.append(members)
            members, num_bytes = [], 0
    return [*buckets, members] if members else buckets


def buckets_never_above(sizes_bytes: list[int], bucket_bytes: int) -> list[list[int]]:
    """Close before the capacity would be passed."""
    buckets, members, num_bytes = [], [], 0
    for index in reversed(range(len(sizes_bytes))):
        if members and num_bytes + sizes_bytes[index] > bucket_bytes:
            buckets.append(members)
            members, num_bytes = [], 0
        members.append(index)
        num_bytes += sizes_bytes[index]
    return [*buckets, members] if members else buckets


def overlap_after_backward(buckets: list[FlatBucket]) -> Callable[[], None]:
    """Start everything after backward."""

    def synchronize() -> None:
        for bucket in buckets:
            bucket.start(None)
        for bucket in buckets:
            bucket.finish()

    return synchronize


def _overlap(
    buckets: list[FlatBucket], *, in_order: bool = True, wait: bool = False, reset: bool = True, rest: bool = True
) -> Callable[[], None]:
    """Build an overlap of which one thing may be wrong."""
    missing = [len(bucket.parameters) for bucket in buckets]
    started: list[int] = []

    def start(index: int) -> None:
        buckets[index].start(None)
        started.append(index)
        if wait:
            buckets[index].finish()

    def gradient_ready(index: int) -> None:
        missing[index] -= 1
        if not in_order and missing[index] == 0:
            start(index)
        while in_order and len(started) < len(buckets) and missing[len(started)] == 0:
            start(len(started))

    for index, bucket in enumerate(buckets):
        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: gradient_ready(index))

    def synchronize() -> None:
        for index in range(len(buckets)) if rest else ():
            if index not in started:
                start(index)
        for index in () if wait else list(started):
            buckets[index].finish()
        started.clear()
        if reset:
            missing[:] = [len(bucket.parameters) for bucket in buckets]

    return synchronize


def overlap_waits_in_hook(buckets: list[FlatBucket]) -> Callable[[], None]:
    """Wait where the bucket is started."""
    return _overlap(buckets, wait=True)


def overlap_first_full_first(buckets: list[FlatBucket]) -> Callable[[], None]:
    """Start whichever bucket is full first."""
    return _overlap(buckets, in_order=False)


def overlap_never_reset(buckets: list[FlatBucket]) -> Callable[[], None]:
    """Never set the counts back."""
    return _overlap(buckets, reset=False)


def overlap_forgets_unused(buckets: list[FlatBucket]) -> Callable[[], None]:
    """Leave out buckets that never became full."""
    return _overlap(buckets, rest=False)


def overlap_last_of_the_loop(buckets: list[FlatBucket]) -> Callable[[], None]:
    """Make hooks in a loop that all see its last bucket."""
    for bucket in buckets:
        missing = len(bucket.parameters)

        def hook(_: torch.Tensor) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                bucket.start(None)  # noqa: B023 - the fault itself

        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(hook)
    return lambda: [bucket.finish() for bucket in buckets] and None


def overlap_one_hook_a_bucket(buckets: list[FlatBucket]) -> Callable[[], None]:
    """Watch one parameter of each bucket."""
    started: list[int] = []

    def start(index: int) -> None:
        buckets[index].start(None)
        started.append(index)

    for index, bucket in enumerate(buckets):
        bucket.parameters[-1].register_post_accumulate_grad_hook(lambda _, index=index: start(index))

    def synchronize() -> None:
        for index in range(len(buckets)):
            if index not in started:
                start(index)
        for bucket in buckets:
            bucket.finish()
        started.clear()

    return synchronize


def hooks_divide_later(module: nn.Module) -> None:
    """Leave the division to somebody else."""

    def gradient_ready(gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient)
        return gradient

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(gradient_ready)


def hooks_return_nothing(module: nn.Module) -> None:
    """Average a copy and do not hand it back."""

    def gradient_ready(gradient: torch.Tensor) -> None:
        mean = gradient / dist.get_world_size()
        dist.all_reduce(mean)

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(gradient_ready)


def hooks_on_a_copy(module: nn.Module) -> None:
    """Register the hooks on another module."""

    def gradient_ready(parameter: nn.Parameter) -> None:
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)

    for parameter in copy.deepcopy(module).parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(gradient_ready)


def hooks_never_wait(module: nn.Module) -> None:
    """Start and never wait."""

    def gradient_ready(parameter: nn.Parameter) -> None:
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad, async_op=True)

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(gradient_ready)
