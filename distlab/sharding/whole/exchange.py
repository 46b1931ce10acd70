"""Tensors that travel together: every rank's parts of them to those who see them whole, and the new values back.

A part travels as its gradient and its values. Where no rank has a gradient, -0.0 stands for each of its numbers, and
0.0 for any other -0.0, so that the message itself says which tensors a step passes by.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.comm.p2p import started
from distlab.sharding.part import plain
from distlab.sharding.whole.held import HeldTensor


class TravellingTensors:
    """One bucket: `start`, `arrive`, then an optimizer's step, then `leave`, `finish`.

    Args:
        tensors: of one dtype on one device, each with what an optimizer of the whole tensor updates.
        owners: who sees each whole; None: everyone.
        group: ranks that hold the parts.

    Cost: with E elements and owners two all-to-alls: (n-1)/n of 2 E/n and of E/n sent in the mean over ranks.
        Where everyone sees all, one all-to-all: 2 (n-1)/n E sent in the mean.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[HeldTensor, nn.Parameter]],
        owners: Sequence[int] | None,
        group: ProcessGroup | None,
    ) -> None:
        self.group, self._everyone = group, owners is None
        self._ranks, self._rank = range(dist.get_world_size(group)), dist.get_rank(group)
        every = list(zip(tensors, owners or [0] * len(tensors), strict=True))
        self._of = [[one for one, owner in every if owners is None or owner == rank] for rank in self._ranks]
        self._own = self._of[self._rank]
        self._empty = [parameter.data for _, parameter in self._own]  # of the whole shape, without memory
        self._nothing = tensors[0][1].new_empty(0)
        self._rows: Sequence[Tensor] = ()  # which arrive
        self._sent = self._nothing
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Begin to send this rank's gradients and values."""
        rows = [[row for held, _ in its for row in _rows_of(held)] for its in self._of]
        self._exchange(rows, [[held.size(rank) for held, _ in self._own for _ in range(2)] for rank in self._ranks])

    @torch.no_grad()
    def arrive(self) -> None:
        """Wait, and make the tensors that this rank sees whole: values, and the gradient where there is one."""
        wholes = [parameter.new_empty(2, parameter.numel()) for _, parameter in self._own]
        rows = iter(self._arrived())
        for rank in self._ranks:
            for (held, _), whole in zip(self._own, wholes, strict=True):
                for row in whole:
                    row[slice(*held.ranges[rank])] = next(rows)
        first = torch.stack([self._nothing.new_zeros(()), *(whole[0, 0] for whole in wholes)])[1:].cpu()
        unused = ((first == 0) & torch.signbit(first)).tolist()
        for (held, parameter), whole, is_unused in zip(self._own, wholes, unused, strict=True):
            parameter.data = whole[1].view(held.shape)
            parameter.grad = None if is_unused else whole[0].view(held.shape)

    @torch.no_grad()
    def leave(self) -> None:
        """Begin to send what became of the values; whole tensors are let go."""
        new = [(held, parameter.detach().reshape(-1)) for held, parameter in self._own]
        rows = [[whole[slice(*held.ranges[rank])] for held, whole in new] for rank in self._ranks]
        for (_, parameter), empty in zip(self._own, self._empty, strict=True):
            parameter.data, parameter.grad = empty, None
        if self._everyone:
            self._rows = rows[self._rank]
        else:
            self._exchange(rows, [[held.size(self._rank) for held, _ in its] for its in self._of])

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, and take this rank's new values."""
        every = self._own if self._everyone else [one for its in self._of for one in its]
        for (held, _), row in zip(every, self._arrived(), strict=True):
            plain(held.part).view(-1).copy_(row)
        self._rows, self._sent = (), self._nothing

    def _exchange(self, rows: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]) -> None:
        """Begin to send rows to each rank, and to receive rows of these sizes from each."""
        self._sent = torch.cat([self._nothing, *(row.to(self._nothing.device) for its in rows for row in its)])
        give, take = [sum(map(len, its)) for its in rows], [sum(its) for its in sizes]
        arriving = self._sent.new_empty(sum(take))
        self._rows = arriving.split([size for its in sizes for size in its])
        call = dist.all_to_all_single(arriving, self._sent, take, give, group=self.group, async_op=True)
        self._work = started(call)

    def _arrived(self) -> Sequence[Tensor]:
        if self._work is not None:
            self._work.wait()
        self._work = None
        return self._rows


def _rows_of(held: HeldTensor) -> tuple[Tensor, Tensor]:
    """Return this rank's gradient and values, as rows."""
    values, gradient = plain(held.part).reshape(-1), held.part.grad
    if gradient is None:
        return torch.full_like(values, -0.0), values
    return plain(gradient).reshape(-1) + 0.0, values  # what is -0.0 becomes 0.0
