"""Where a unit's whole gradient waits to be summed: one unit's at a time.

Ranks that share memory take one buffer for it, which all of them can read, so that the sum needs no copy.
Elsewhere each gradient has memory of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.shared_memory.group_base import buffer_of


class GradientMemory:
    """Memory for the gradients of all units of a model, one after the other.

    Args:
        group: ranks that sum them.
        device: where gradients lie.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self._largest_bytes = 0
        self._is_made = False
        self._buffer: Tensor | None = None

    def reserve(self, num_bytes: int) -> None:
        """Reserve room for this many bytes, before the first gradient comes."""
        self._largest_bytes = max(self._largest_bytes, num_bytes)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory without values; the gradient that was in it before has been summed by all ranks.

        Every rank calls this for the same units in the same order: the first call makes the buffer together.
        """
        if not self._is_made:
            self._is_made = True
            self._buffer = buffer_of(self._largest_bytes, dtype=torch.uint8, device=self.device, group=self.group)
        if self._buffer is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return self._buffer[: numel * dtype.itemsize].view(dtype)
