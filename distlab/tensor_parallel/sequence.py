"""Sequence parallelism: between two tensor-parallel regions each rank holds a part of the sequence; and dropout.

What lies there (norms, dropout, the residual stream) works on each position alone, and all t ranks would do the same
work and keep the same activations. With the positions split no work is done twice. An all-reduce is a
reduce-scatter and an all-gather anyway, and those two take its place: at the same bytes, ranks keep 1/t of everything
but what they gather for a region, its input. (Megatron-LM gathers that again in backward.)

The price: a parameter that is used there (a norm's) sees on each rank only its positions, so its gradient is a part of
a sum. Forgotten, training goes on with wrong norms that differ from rank to rank.

Dropout. Where every rank holds an activation whole, all must drop the same numbers, or their copies drift apart:
`nn.Dropout` is right there, on the condition that torch's own generator is in the same state on all ranks of the group
(seed it by the data-parallel rank). Where each holds a part (its heads, its features, its positions), the same mask on
all ranks would repeat itself along the tensor: there each draws its own.

A rank's own draws must not move torch's generator, or the next common mask would differ. So one number is drawn from
the common generator, on every rank the same, and a rank's own seed is derived from that and its rank. There is no other
state: what saves and restores torch's generator (recompute, a checkpoint) repeats these draws too.

Symbols: t ranks; B samples, S positions, H features.

Source: Korthikanti et al. 2022, section 4.2.2.
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
from distlab.tensor_parallel.functions import split_sequence, sum_gradients
from distlab.tensor_parallel.linear import take_parts


class SequenceParallelNorm(nn.Module):
    """A LayerNorm over parts of a sequence: the same weights on each rank, their gradients summed over ranks.

    Shapes: x [..., S/t, H] -> [..., S/t, H]
    Cost: backward one all-reduce of the weight's and the bias' gradients: 2 (t-1)/t of 2 H elements sent per rank.
    Error: forward exact; gradients of weight and bias as sums in a different order.

    Args:
        norm: rank 0's counts; over the last dim.
        group: the ranks.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, norm: nn.LayerNorm, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.group, self.shape, self.eps = group, norm.normalized_shape, norm.eps
        take_parts(self, norm, group=group)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each position."""
        parameters = sum_gradients([p for p in (self.weight, self.bias) if p is not None], self.group)
        weight, bias = (*parameters, None, None)[:2]  # a norm without a weight has no bias either
        return F.layer_norm(x, self.shape, weight, bias, self.eps)


class SequenceParallelPositions(nn.Module):
    """An embedding of positions that gives each rank its part of the sequence.

    Shapes: positions [S] -> [S/t, H]
    Cost: nothing forward; backward an all-gather of its gradient: (t-1)/t of S H elements sent per rank.

    Args:
        embedding: rank 0's counts.
        group: the ranks.

    Raises:
        ValueError: forward: the ranks do not divide S.
    """

    weight: nn.Parameter

    def __init__(self, embedding: nn.Embedding, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        take_parts(self, embedding, group=group)

    def forward(self, positions: Tensor) -> Tensor:
        """Look all positions up, and keep the own ones: so every rank gets the whole gradient."""
        return split_sequence(F.embedding(positions, self.weight), self.group)


@contextmanager
def own_random(device: torch.device, group: ProcessGroup | None = None) -> Iterator[None]:
    """Draw this rank's own numbers inside, and leave torch's generators as on every other rank."""
    common = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derive_seed(common, group_rank(group), "tensor parallel"))
        yield


class SplitDropout(nn.Dropout):
    """Dropout of an activation of which each rank holds a different part.

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
