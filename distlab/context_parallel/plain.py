"""The plainest ring attention: each rank keeps its queries, and the keys and values of all go round. Nothing overlaps.

Attention is a weighted mean: softmax(scores) @ values. A rank that has seen only some of the keys can keep the mean
over those, and beside it the logarithm of the sum of their weights (log-sum-exp). Two such means make the mean over
both sets of keys, exactly: each counts with its share of the weights.

Here autograd does backward: the one thing that it cannot know is that what a rank passed on comes back as a gradient
the other way round. Every block of scores is computed, also those that the causal mask blots out: half of the work is
for nothing. And all blocks are kept for backward. `RingAttention` mends these three.

Symbols: n ranks, B samples, A heads, S positions of the whole sequence, D size of a head, H = A D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.p2p import group_rank, send_receive
from distlab.context_parallel.placement import zigzag_positions


class PassOn(torch.autograd.Function):
    """Give a tensor to the next rank of the ring and return that of the one before; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        """Give this rank's x, return that of the rank before."""
        ctx.group = group
        return _around(x, 1, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Send the gradient of the received tensor back to its rank; return that of the tensor that was sent."""
        return _around(gradient, -1, ctx.group), None


def _around(x: Tensor, step: int, group: ProcessGroup | None) -> Tensor:
    rank, num_ranks = group_rank(group), dist.get_world_size(group)
    x = x.detach().contiguous()
    arrived = torch.empty_like(x)
    send_receive(x, (rank + step) % num_ranks, arrived, (rank - step) % num_ranks, group)
    return arrived


def plain_ring_attention(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Attend causally over a sequence whose positions lie on the ranks in the zig-zag order.

    Shapes: query, key, value [B, A, S/n, D] -> [B, A, S/n, D]
    Cost: 2 (n-1)/n B S H elements sent per rank in forward, as many in backward; n blocks of scores, S/n by S/n, kept.
    Error: exact up to the order of additions.

    Raises:
        ValueError: the length is odd (on more than one rank).
    """
    rank, num_ranks = group_rank(group), dist.get_world_size(group)
    length = num_ranks * query.shape[-2]
    mine = zigzag_positions(length, num_ranks, rank)
    mean: Tensor  # of the values that were seen so far
    key_value = torch.stack([key, value])
    for step in range(num_ranks):
        if step:
            key_value = PassOn.apply(key_value, group)  # type: ignore[no-untyped-call]
        theirs = zigzag_positions(length, num_ranks, (rank - step) % num_ranks)
        key, value = key_value
        scores = query @ key.mT / query.shape[-1] ** 0.5  # [B, A, S/n, S/n]
        # A finite number, so that a row without any visible key has a weight of zero, and no gradient is NaN.
        low = torch.finfo(scores.dtype).min / 2
        scores = scores.masked_fill((mine[:, None] < theirs).to(scores.device), low)
        new, new_sum = scores.softmax(-1) @ value, scores.logsumexp(-1, keepdim=True)
        if step == 0:
            mean, log_sum = new, new_sum
        else:
            total = torch.logaddexp(log_sum, new_sum)
            mean = (log_sum - total).exp() * mean + (new_sum - total).exp() * new
            log_sum = total
    return mean
