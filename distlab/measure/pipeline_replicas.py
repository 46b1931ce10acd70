"""Data parallelism over a pipeline: each stage's gradients are averaged over its replicas as soon as they are complete.

Ranks are numbered stage by stage, replica by replica (rank = stage x data + replica, as the simulator numbers them), so
each rank is in two groups: its pipeline, and the replicas of its stages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.flat import FlatBuffer
from distlab.pipeline import Pipeline


def pipeline_groups(num_replicas: int) -> tuple[ProcessGroup, ProcessGroup]:
    """Return this rank's pipeline and the replicas of its stages. Every rank calls this.

    Raises:
        ValueError: the ranks do not make so many equal pipelines.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if num_replicas < 1 or world_size % num_replicas:
        raise ValueError(f"{world_size} ranks do not make {num_replicas} equal pipelines; use a divisor")
    pipelines = [list(range(first, world_size, num_replicas)) for first in range(num_replicas)]
    replicas = [list(range(first, first + num_replicas)) for first in range(0, world_size, num_replicas)]
    groups = [
        next(group for group, members in made if rank in members)
        for made in ([(dist.new_group(members), members) for members in sets] for sets in (pipelines, replicas))
    ]
    return groups[0], groups[1]


class StageAverages:
    """Averages the gradients of a pipeline's stages over its replicas, each stage while others still compute.

    Every replica starts from the first one's weights. Call `finish` between `step` and the optimizer's update; all
    replicas run the same schedule.

    Cost: one all-reduce of a stage's gradients a step. Where gradients are accumulated over several steps, call
        `finish` after each: the sum of means is the mean of sums, at the cost of an all-reduce a step.
    Error: equal to one process on the whole batch up to the order of sums.
    """

    def __init__(self, pipeline: Pipeline, stages: Mapping[int, nn.Module], group: ProcessGroup) -> None:
        self._group = group
        self._parameters = {
            number: [parameter for parameter in module.parameters() if parameter.requires_grad]
            for number, module in stages.items()
        }
        self._buffers = {number: FlatBuffer(own) for number, own in self._parameters.items() if own}
        self._works: list[tuple[int, dist.Work | None]] = []
        for module in stages.values():
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, group=group, group_src=0)
        pipeline.on_stage_complete = self._start

    def _start(self, stage: int) -> None:
        """Send a stage's gradients on their way."""
        if stage not in self._buffers:
            return
        flat = self._buffers[stage]
        flat.pack([parameter.grad for parameter in self._parameters[stage]])
        flat.buffer /= dist.get_world_size(self._group)  # divide, then sum: gloo knows no mean
        self._works.append((stage, dist.all_reduce(flat.buffer, group=self._group, async_op=True)))

    def finish(self) -> None:
        """Wait for the means and put them in place of the gradients."""
        for stage, work in self._works:
            if work is not None:
                work.wait()
            for parameter, mean in zip(self._parameters[stage], self._buffers[stage].views, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(mean)
        self._works.clear()
