"""Sum half-precision gradients over ranks with one rounding, not n - 1.

A sum in bfloat16 rounds after each addition: 256 + 1 is 256, however often 1 is added. So sums are made in float32.
What is *sent* may stay short: the values were short to begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.blocks.flat import all_gather_single
from distlab.blocks.gradient_hook import GradientBucket, Pending

HALF = (torch.float16, torch.bfloat16)


@torch.no_grad()
def all_reduce_in_float32(tensor: Tensor, group: ProcessGroup | None = None, *, op: str = "sum") -> Tensor:
    """Sum a half-precision tensor over the group, in place, as if it were float32 until the end.

    Each rank receives everybody's values of its own part as they are, adds them in float32, rounds once, and gives the
    result to all. A float32 copy sent instead would need twice the bytes.

    Shapes: any; the same on all ranks; contiguous; returns `tensor`.
    Cost: 2 E (n-1)/n elements of the tensor's own type sent per rank (as a ring in that type); two calls. A longer type
        takes one plain all-reduce.
    Error: one rounding of the float32 sum; a sum in bfloat16 rounds n - 1 times. The same bits on every rank.

    Raises:
        ValueError: before any message: an op other than "sum" or "mean", or a tensor that is not contiguous.
    """
    return _start_float32(tensor, group, op)()


def _start_float32(tensor: Tensor, group: ProcessGroup | None, op: str) -> Callable[[], Tensor]:
    """Begin to exchange, and return what finishes it."""
    if op not in ("sum", "mean") or not tensor.is_contiguous():
        raise ValueError(
            f"op is {op!r}, contiguous {tensor.is_contiguous()}; pass sum or mean, and a contiguous tensor"
        )
    num_ranks = dist.get_world_size(group)
    divisor = num_ranks if op == "mean" else 1
    if tensor.dtype not in HALF:
        tensor.div_(divisor)
        plain = dist.all_reduce(tensor, group=group, async_op=True)
        return lambda: (plain.wait(), tensor)[1]
    flat = tensor.detach().view(-1)
    share = -(-flat.numel() // num_ranks)
    outgoing = flat.new_zeros(num_ranks * share)  # [n * share], the last part padded
    outgoing[: flat.numel()] = flat
    incoming = torch.empty_like(outgoing)
    work = dist.all_to_all_single(incoming, outgoing, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        theirs = incoming.view(num_ranks, share)  # my part, as each rank has it
        mine = theirs[0].float()
        for other in theirs[1:]:  # in the order of ranks, so the same input gives the same bits again
            mine.add_(other)
        mine = mine.div_(divisor).to(flat.dtype)  # divided while long, or a mean that fits would overflow on its way
        all_gather_single(outgoing, mine, group=group)
        flat.copy_(outgoing[: flat.numel()])
        return tensor

    return finish


class Float32Reduce:
    """GradientHook that averages half-precision buckets in float32: `DataParallel(module, hook=Float32Reduce())`.

    Cost: as `all_reduce_in_float32`: the bytes of a half-precision all-reduce.
    Error: one rounding of the mean.
    """

    def start(self, bucket: GradientBucket, group: ProcessGroup | None) -> Pending:
        """Begin to exchange a bucket; do not wait."""
        return _Reducing(_start_float32(bucket.buffer, group, "mean"))

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: no step depends on an earlier one."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back nothing."""


class _Reducing:
    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish

    @torch.no_grad()
    def wait(self) -> None:
        """Leave the mean in the buffer."""
        self._finish()
