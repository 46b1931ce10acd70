"""One contiguous buffer with a view for each tensor: many small messages become one large one, without copies.

Sending a thousand tensors one by one costs a thousand latencies; sending one buffer costs one. When the tensors *are*
views of the buffer nothing has to be packed before the send, nor unpacked after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both and warns at the old names, which 2.11 has alone.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def same_kind(tensors: Iterable[AnyTensor]) -> list[list[AnyTensor]]:
    """Split tensors into lists of one dtype on one device, in order of first appearance.

    Shapes: any
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[AnyTensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


MOST_ALIGNED = 4


def alignment(tensor: Tensor) -> int:
    """Return the largest power of two, up to 4, that divides a tensor's number of elements.

    In an order of falling alignment each tensor begins where `torch.view_as_complex` of it may.

    Shapes: any
    """
    return math.gcd(tensor.numel(), MOST_ALIGNED)


class FlatBuffer:
    """Storage for a list of tensors, end to end in one buffer of zeros.

    Attributes:
        buffer: the whole, one dimension.
        views: one tensor per given tensor, of its shape, that shares the buffer's memory.
        offsets: first element of each view in the buffer.

    Args:
        tensors: give shapes, dtype and device; their values are not copied (see `pack`).
        multiple_of: the buffer's length is rounded up to a multiple of this many bytes. Libraries cut a buffer into
            equal parts, one per rank, and add parts that begin on a cache line faster than others.
        zeros: makes the buffer; called as torch.zeros is.

    Raises:
        ValueError: no tensors, or tensors that differ in dtype or device.
    """

    def __init__(
        self, tensors: Sequence[Tensor], *, multiple_of: int = 1, zeros: Callable[..., Tensor] = torch.zeros
    ) -> None:
        kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
        if len(kinds) != 1:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "no tensors"
            text = f"a flat buffer holds tensors of one dtype on one device; got {found}; use one buffer each"
            raise ValueError(text)
        dtype, device = kinds.pop()
        sizes = [tensor.numel() for tensor in tensors]
        self.offsets = tuple(accumulate(sizes, initial=0))[:-1]
        unit = max(1, multiple_of // dtype.itemsize)
        self.buffer = zeros(-(-sum(sizes) // unit) * unit, dtype=dtype, device=device)
        self.views = tuple(
            self.buffer[offset : offset + size].view(tensor.shape)
            for offset, size, tensor in zip(self.offsets, sizes, tensors, strict=True)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.numel() * self.buffer.element_size()

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor | None]) -> None:
        """Copy tensors into their places; None counts as zeros."""
        for view, tensor in zip(self.views, tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor)

    @torch.no_grad()
    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Copy the buffer's values out into tensors."""
        for view, tensor in zip(self.views, tensors, strict=True):
            tensor.copy_(view)
