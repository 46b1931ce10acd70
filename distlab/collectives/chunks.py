"""What every algorithm here starts with: a tensor seen as one flat row, cut into chunks, and a way to combine two.

A collective never looks at a tensor's shape. It sees `L` elements in a row and cuts them into one chunk per rank,
`L // n` elements each and one more in the first `L % n`. So any length works: with fewer elements than ranks some
chunks are empty, and an empty chunk is not sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from distlab.comm.p2p import group_rank, require_sendable
from distlab.plan import split_evenly

Combine = Callable[[torch.Tensor, torch.Tensor], object]

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)


class Reduction(NamedTuple):
    """How received values join this rank's own, and what is done once at the end.

    Attributes:
        combine: `combine(own, received)` changes `own` in place.
        divide: whether the finished sum is divided by the number of ranks (the mean).
    """

    combine: Combine
    divide: bool

    def finish(self, tensor: torch.Tensor, num_ranks: int) -> None:
        """Turn the sum into the mean, where that is asked for; one rank does it per chunk and all others copy."""
        if self.divide and num_ranks > 1:
            tensor.div_(num_ranks)


def _maximum(own: torch.Tensor, received: torch.Tensor) -> object:
    return torch.maximum(own, received, out=own)


def _minimum(own: torch.Tensor, received: torch.Tensor) -> object:
    return torch.minimum(own, received, out=own)


_COMBINE: dict[str, Combine] = {
    "sum": torch.Tensor.add_,
    "mean": torch.Tensor.add_,
    "max": _maximum,
    "min": _minimum,
    "prod": torch.Tensor.mul_,
}


def make_reduction(op: str, dtype: torch.dtype, who: str) -> Reduction:
    """Return how to reduce with `op`, or say why that makes no sense for the dtype.

    Raises:
        ValueError: an unknown op, a dtype that has no such operation, or the mean of whole numbers.
    """
    if op not in _COMBINE:
        raise ValueError(f"{who}: op={op!r} is unknown; pass one of {', '.join(_COMBINE)}")
    if dtype not in REAL + WHOLE + COMPLEX:
        raise ValueError(f"{who}: {dtype} cannot be reduced; convert to float16, bfloat16, float32 or float64 first")
    if op == "mean" and dtype in WHOLE:
        raise ValueError(f"{who}: the mean of {dtype} is not a whole number; use op='sum' and divide, or convert first")
    if op not in ("sum", "mean") and dtype in COMPLEX:
        raise ValueError(f"{who}: op={op!r} on {dtype}: complex values take sum or mean only")
    return Reduction(_COMBINE[op], op == "mean")


class Flat(NamedTuple):
    """A checked tensor as one row of elements, and where this rank stands in the group."""

    values: torch.Tensor
    rank: int
    num_ranks: int


def flatten(tensor: torch.Tensor, group: dist.ProcessGroup | None, name: str) -> Flat:
    """See a tensor as a row of elements in the same memory, refusing at once what cannot be changed in place.

    Shapes: any -> [L]

    Raises:
        ValueError: sparse, non-contiguous or meta tensors, a tensor that requires grad, or a rank outside the group.
    """
    rank = group_rank(group)
    require_sendable(tensor, f"rank {rank}: {name}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"rank {rank}: {name} changes the tensor in place, and this one requires grad; "
            "pass tensor.detach() or parameter.grad, or call under torch.no_grad()"
        )
    return Flat(tensor.detach().view(-1), rank, dist.get_world_size(group))


def prepare(tensor: torch.Tensor, group: dist.ProcessGroup | None, op: str, name: str) -> tuple[Flat, Reduction]:
    """Check a tensor and an op together: all that can be refused is refused before the first message.

    Shapes: any -> [L]

    Raises:
        ValueError: as `flatten` and `make_reduction`.
    """
    flat = flatten(tensor, group, name)
    return flat, make_reduction(op, tensor.dtype, f"rank {flat.rank}: {name}")


def check_root(root: int, flat: Flat, name: str) -> None:
    """Refuse a root that is not a rank of the group.

    Raises:
        ValueError: naming the group's ranks.
    """
    if not 0 <= root < flat.num_ranks:
        raise ValueError(
            f"rank {flat.rank}: {name}: root {root} is not in the group, whose ranks are 0 to {flat.num_ranks - 1} "
            "(a rank of the group, not a global rank)"
        )


def cut(values: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """Cut a row into parts of nearly equal length: views, the first `length % num_parts` one element longer.

    Shapes: [L] -> num_parts of about [L / num_parts]
    """
    return [values[start:stop] for start, stop in split_evenly(values.numel(), num_parts)]


def num_pieces(chunk: torch.Tensor, piece_bytes: int) -> int:
    """Return into how many messages of about `piece_bytes` a chunk is cut: at least one, at most one per element."""
    return max(1, min(chunk.numel(), -(-chunk.numel() * chunk.element_size() // piece_bytes)))


def check_piece_bytes(piece_bytes: int, flat: Flat, name: str) -> None:
    """Refuse pieces of nothing.

    Raises:
        ValueError: piece_bytes is not positive.
    """
    if piece_bytes < 1:
        raise ValueError(
            f"rank {flat.rank}: {name}: piece_bytes={piece_bytes}, expected at least 1; the default suits most machines"
        )
