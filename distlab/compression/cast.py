"""Send every element in half precision: the least that compression can do, and the cheapest.

No codec is needed, and numbers of 16 bits line up: an all-reduce adds them. Gradients are divided by the number of
ranks while they are still long, so that a mean that fits never overflows on its way there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.blocks.gradient_hook import GradientBucket, Pending
from distlab.compression.feedback import FeedbackHook, members_where, refuse_not_finite

CAST_DTYPES = (torch.float16, torch.bfloat16)
PART = 1 << 16  # elements


class Cast(FeedbackHook):
    """Send every element in half precision.

    Args:
        dtype: torch.float16 (11 bits of precision, at most 65,504) or torch.bfloat16 (8 bits, the range of float32).

    Cost: one all-reduce of 2 E bytes.
    Error: about 2**-11 (float16) or 2**-8 (bfloat16) of a gradient, for each addition; no memory keeps it.

    Raises:
        ValueError: a different dtype.
    """

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        if dtype not in CAST_DTYPES:
            raise ValueError(f"dtype is {dtype}; choose one of {', '.join(map(str, CAST_DTYPES))}")
        super().__init__(f"cast to {dtype}", error_feedback=False)
        self._dtype = dtype
        self._small: dict[int, Tensor] = {}

    def start(self, bucket: GradientBucket, group: ProcessGroup | None) -> Pending:
        """Divide, shorten and begin to add up."""
        self.end_last(bucket)
        self.begin(bucket, group)
        small = self._small.get(bucket.index)
        if small is None or small.numel() != bucket.buffer.numel() or small.device != bucket.buffer.device:
            small = self._small[bucket.index] = torch.empty_like(bucket.buffer, dtype=self._dtype)
        scale = 1 / dist.get_world_size(group)
        sums = []
        for part, short in zip(_in_cache(bucket.buffer), _in_cache(small), strict=True):
            scaled = part * scale  # before it is short, or what still fits would overflow
            short.copy_(scaled)
            sums.append(scaled.sum())
        work = dist.all_reduce(small, group=group, async_op=True)
        self._works[bucket.index] = work
        return _Casting(bucket, group, small, torch.stack(sums), work)


@dataclass
class _Casting:
    """Short numbers on their way through an all-reduce."""

    bucket: GradientBucket
    group: ProcessGroup | None
    small: Tensor
    own_sums: Tensor  # not finite where this rank's gradients are not
    work: Any

    def wait(self) -> None:
        """Leave the mean in the buffer."""
        self.work.wait()
        sums = []
        for part, short in zip(_in_cache(self.bucket.buffer), _in_cache(self.small), strict=True):
            part.copy_(short)
            sums.append(part.sum(dtype=torch.float32))
        if not torch.stack(sums).isfinite().all():
            refuse_not_finite(self.bucket, self.group, members_where(~self.own_sums.isfinite().all(), self.group))


def _in_cache(vector: Tensor) -> tuple[Tensor, ...]:
    """Cut a vector so that a part stays in a CPU's cache from one operation to the next; a GPU takes it whole."""
    parts: tuple[Tensor, ...] = vector.split(PART if vector.device.type == "cpu" else max(1, vector.numel()))
    return parts
