"""The plainest pipeline: GPipe by hand, one stage per rank, all messages of one shape. Nothing is sent ahead of time.

The batch is cut into micro-batches. Each rank runs its stage forward on one after the other: while rank 1 works on
micro-batch 0, rank 0 works on micro-batch 1. Then the gradients flow back the same way. At the start the last rank
waits for work and at the end the first one does: that is the bubble, (p - 1) of m + p - 1 turns for p stages.

`Pipeline` does the same for any schedule and any values, receives ahead, and sends without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_world_size

from distlab.comm.p2p import Receive, Send, exchange, group_rank


def plain_step(
    stage: nn.Module,
    batch: tuple[Tensor, Tensor],
    *,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    num_microbatches: int,
    between: Sequence[int],
    group: ProcessGroup | None = None,
) -> Tensor:
    """Run forward and backward of a batch; each parameter's `.grad` grows by that of the mean loss over the batch.

    It takes 2 (m + p - 1) turns: as many backward as forward.

    Args:
        stage: this rank's part of the model.
        batch: inputs, read on the first rank, and targets, read on the last; each rank needs their lengths.
        loss_fn: mean loss of outputs and targets.
        num_microbatches: divides the batch.
        between: shape of what a stage hands to the next for one micro-batch, without the batch: [s, h].
        group: the ranks, stage by stage.

    Returns:
        The mean loss on the last rank, zero elsewhere.

    Shapes: inputs [m B, ...], targets [m B, ...] -> []; between stages [B, s, h]
    Cost: m B s h elements sent to the next rank, and as many back.
    """
    rank, last = group_rank(group), get_world_size(group) - 1
    parts, answers = (tensor.chunk(num_microbatches) for tensor in batch)
    dtype = next(stage.parameters()).dtype
    total = torch.zeros((), dtype=dtype)
    kept: list[tuple[Tensor, Tensor]] = []
    for part, answer in zip(parts, answers, strict=True):  # forward, all micro-batches
        x = part
        if rank > 0:
            x = torch.empty(len(part), *between, dtype=dtype)
            exchange(Receive(x, rank - 1), group=group)
            x.requires_grad_()  # or no gradient would flow to the ranks before
        y = stage(x)
        if rank < last:
            exchange(Send(y.detach(), rank + 1), group=group)
        else:
            y = loss_fn(y, answer) / num_microbatches  # or gradients would be as many times too large
            total += y.detach()
        kept.append((x, y))
    for x, y in kept:  # backward, in the same order
        gradient = None
        if rank < last:
            gradient = torch.empty_like(y)
            exchange(Receive(gradient, rank + 1), group=group)
        y.backward(gradient)
        if rank > 0:
            assert x.grad is not None, "the stage uses its input"
            exchange(Send(x.grad, rank - 1), group=group)
    return total
