"""Dropout where ranks hold the same activation, and where each holds another part of it.

Where every rank holds an activation whole, all must drop the same numbers, or their copies drift apart: `nn.Dropout`
is right there, on the condition that torch's own generator is in the same state on all ranks of the group (seed it by
the data-parallel rank). Where each holds a part (its heads, its features, its positions), the same mask on all ranks
would repeat itself along the tensor: there each draws its own.

A rank's own draws must not move torch's generator, or the next common mask would differ. So one number is drawn from
the common generator, on every rank the same, and a rank's own seed is derived from that and its rank. There is no other
state: what saves and restores torch's generator (recompute, a checkpoint) repeats these draws too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.comm.p2p import group_rank
from distlab.rng import derive_seed


@contextmanager
def own_random(device: torch.device, group: ProcessGroup | None = None) -> Iterator[None]:
    """Draw this rank's own numbers inside, and leave torch's generators as on every other rank."""
    common = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derive_seed(common, group_rank(group), "tensor parallel"))
        yield


class SplitDropout(nn.Dropout):
    """Dropout of an activation of which each rank holds another part.

    Shapes: x [...] -> [...]
    """

    def __init__(self, p: float, group: ProcessGroup | None = None) -> None:
        super().__init__(p)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Drop numbers of one's own."""
        if not self.training or not self.p:
            return x
        with own_random(x.device, self.group):
            return F.dropout(x, self.p)
