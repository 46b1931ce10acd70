"""The plainest compressed averaging: each rank sends its few largest elements, and remembers all others for later.

One parameter after the other, once backward is over. The ranks' largest elements stand in different places, so that
they cannot be added on the way: each rank gets the elements of all, with their places, and adds them itself. The hooks
(`TopK` and its relatives) do it for whole buckets, while backward goes on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class PlainTopK:
    """Replaces gradients by a mean over ranks that is made of their largest elements.

    Args:
        parameters: the same on every rank, each with a gradient after backward.
        ratio: share of a gradient's elements that is sent, one at least.
        group: the ranks.

    Attributes:
        memories: of each parameter, what this rank has not sent yet.

    Cost: of a gradient of E elements, max(1, round(ratio E)) values and as many places of 8 bytes go to each rank.
    Error: what was sent so far and the memories add up to all gradients; with ratio 1 it is the mean, exactly.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], ratio: float, group: ProcessGroup | None = None) -> None:
        self.memories = {parameter: torch.zeros_like(parameter, requires_grad=False) for parameter in parameters}
        self.ratio, self.group = ratio, group

    @torch.no_grad()
    def average(self) -> None:
        """Put the mean of what the ranks send into each gradient; call this between backward and the optimizer."""
        for parameter, memory in self.memories.items():
            assert parameter.grad is not None, "it took part in forward"
            memory += parameter.grad
            waiting = memory.view(-1)
            places = waiting.abs().topk(max(1, round(self.ratio * waiting.numel()))).indices
            values = waiting[places]
            waiting[places] = 0  # what is sent is not owed any more
            mean = torch.zeros_like(waiting)
            for theirs, sent in zip(self._from_all(places), self._from_all(values), strict=True):
                mean.index_add_(0, theirs, sent)
            parameter.grad.copy_(mean.view_as(parameter) / dist.get_world_size(self.group))

    def _from_all(self, mine: Tensor) -> list[Tensor]:
        """Return every rank's tensor of this shape."""
        tensors = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(tensors, mine, group=self.group)
        return tensors
