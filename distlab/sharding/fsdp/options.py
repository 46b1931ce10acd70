"""Options: what all units of a model have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distlab.comm.device import CopyStream
from distlab.plan import Precision
from distlab.sharding.fsdp.gradient import GradientMemory
from distlab.trace import SpanWriter


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


def check_options(prefetch: int, precision: Precision | None) -> None:
    """Refuse options that no units can be made of.

    Raises:
        ValueError: a prefetch that is not a count, or types that clash.
    """
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch is {prefetch!r}; pass a whole number of at least 0")
    kept = "float32" if precision is None or precision.master else precision.compute
    if precision is not None and precision.gradients != kept:
        raise ValueError(
            f"precision: gradients are kept as {precision.gradients} and shards as {kept}, and an optimizer wants one "
            f"type; pass gradients={kept!r} or another master"
        )
