"""Buckets: which gradients travel together.

One all-reduce per parameter pays the network's latency once per parameter; one all-reduce for all of them cannot
start before the backward pass has ended. Buckets are the middle way. The backward pass produces gradients in about the
reverse of the order in which the module registered its parameters, so buckets are filled in that reverse order: the
first bucket is full first, and travels while the rest of the backward pass still computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced in one call.

    Attributes:
        index: place of the bucket in the order in which buckets fill.
        parameters: indices into the list of parameters, in the order in which their gradients are expected.
        num_bytes: bytes of the bucket's gradients.
    """

    index: int
    parameters: tuple[int, ...]
    num_bytes: int


def assign_buckets(
    sizes_bytes: Sequence[int], bucket_bytes: int, first_bucket_bytes: int | None = None
) -> tuple[Bucket, ...]:
    """Assign every parameter to a bucket, walking the parameters in reverse order.

    A bucket closes as soon as its size reaches its capacity, so it may end above it by less than one tensor. The first
    bucket may be smaller than the others, so that communication starts early. A tensor larger than `bucket_bytes` gets
    a bucket of its own: the small gradients that were ready before it do not wait for it.

    Raises:
        ValueError: a capacity below one byte, or a negative size.

    Source: torch.distributed's `_compute_bucket_assignment_by_size`, as DistributedDataParallel applies it after its
        first step. There, a tensor larger than the capacity joins the bucket that is open.
    """
    first_bucket_bytes = bucket_bytes if first_bucket_bytes is None else first_bucket_bytes
    for name, capacity in (("bucket_bytes", bucket_bytes), ("first_bucket_bytes", first_bucket_bytes)):
        if capacity < 1:
            raise ValueError(f"{name} is {capacity}; a bucket holds at least one byte: pass a number of at least 1")
    groups: list[list[int]] = [[]]  # the last one is open
    num_bytes = 0  # in it
    for parameter in reversed(range(len(sizes_bytes))):
        size = int(sizes_bytes[parameter])
        if size < 0:
            raise ValueError(f"parameter {parameter} has a size of {size} bytes; pass sizes of at least 0")
        if size > bucket_bytes and groups[-1]:
            groups.append([])
            num_bytes = 0
        groups[-1].append(parameter)
        num_bytes += size
        if num_bytes >= (bucket_bytes if len(groups) > 1 else first_bucket_bytes):
            groups.append([])
            num_bytes = 0
    sizes = [sum(int(sizes_bytes[parameter]) for parameter in group) for group in groups]
    closed = enumerate(zip(groups, sizes, strict=True))
    return tuple(Bucket(index, tuple(group), size) for index, (group, size) in closed if group)
