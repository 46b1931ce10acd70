"""Options: what all units of a model have in common, with the memory in which a whole gradient waits to be summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.device import CopyStream
from distlab.plan import Precision
from distlab.shared_memory.group_base import buffer_of
from distlab.trace import SpanWriter


class GradientMemory:
    """Where a unit's whole gradient waits to be summed: memory for one unit's at a time.

    Ranks that share memory take one buffer for it, which all of them can read, so that the sum needs no copy. Elsewhere
    each gradient has memory of its own.

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


@dataclass(frozen=True)
class Options:
    """What all units of a model have in common.

    Attributes:
        group: ranks that hold a shard each.
        replicas: ranks of other groups that hold the same shard, or None.
        device: where parameters are whole.
        precision: types to compute and to sum in; None keeps the parameters' own.
        offload: shards and their gradients live in the host's memory.
        spans: draws gathers and scatters, or None.
        to_gpu: stream of the copies of offloaded shards.
        to_host: stream of the copies of their gradients.
        gradients: where whole gradients wait to be summed.
    """

    group: ProcessGroup | None
    replicas: ProcessGroup | None
    device: torch.device
    precision: Precision | None
    offload: bool
    spans: SpanWriter | None
    to_gpu: CopyStream
    to_host: CopyStream
    gradients: GradientMemory

    @property
    def num_gradients(self) -> int:
        """Ranks whose gradients a mean is of."""
        num = dist.get_world_size(self.group)
        return num if self.replicas is None else num * dist.get_world_size(self.replicas)
