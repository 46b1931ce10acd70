"""DiLoCo on one screen: every replica makes H steps by itself, then all make one step together.

Data parallelism sends each step's gradient. Here a replica trains alone for H steps, and sends how far it has come: the
difference between the values that all agreed on last, and its own. The mean of these differences points downhill like a
gradient, one of H steps. So an optimizer can use it as a gradient: the outer one.

- Local SGD: the outer optimizer is SGD of rate 1. The agreed values become the mean of the replicas.
- DiLoCo: AdamW inside; outside SGD of rate 0.7 with Nesterov's momentum of 0.9.

With H = 1, SGD inside and the rate 1 outside it is data parallelism again: the mean of the replicas after one step is
one step by the mean gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup


class PlainDiLoCo:
    """Trains a replica on each rank, and brings the replicas together every H steps.

        optimizer = PlainDiLoCo(model.parameters(), torch.optim.AdamW(model.parameters()), every=100)
        loss_fn(model(inputs), targets).backward()
        optimizer.step()

    Args:
        parameters: the same values on every rank at the start.
        inner: this replica's optimizer, of these parameters. Its state stays here.
        every: H, steps from one meeting to the next.
        lr: of the outer step; 1 with momentum 0 is local SGD.
        momentum: of the outer step, Nesterov's.
        group: the replicas.

    Attributes:
        agreed: the values after the last meeting, the same on all ranks.

    Cost: Psi bytes of parameters are all-reduced every H steps: 2 (n-1)/n Psi sent per rank, 1/H of data parallelism's.
        Memory: the agreed values and their momentum, 2 Psi.
    Error: with every=1, plain SGD inside, lr=1 and momentum=0 as data parallelism, up to rounding of a difference.

    Source: Stich 2018 (local SGD, 1805.09767); Douillard et al. 2023 (DiLoCo, 2311.08105).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        inner: torch.optim.Optimizer,
        every: int,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        group: ProcessGroup | None = None,
    ) -> None:
        self.parameters, self.inner, self.every, self.group, self.num_steps = [*parameters], inner, every, group, 0
        self.agreed = [one.detach().clone() for one in self.parameters]
        self.outer = torch.optim.SGD(self.agreed, lr=lr, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def step(self) -> None:
        """Make an inner step; after H of them meet the other replicas."""
        self.inner.step()
        self.num_steps += 1
        if self.num_steps % self.every:
            return
        for agreed, own in zip(self.agreed, self.parameters, strict=True):
            agreed.grad = (agreed - own) / dist.get_world_size(self.group)
            dist.all_reduce(agreed.grad, group=self.group)
        self.outer.step()
        for agreed, own in zip(self.agreed, self.parameters, strict=True):
            own.copy_(agreed)
