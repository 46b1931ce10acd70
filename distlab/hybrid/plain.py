"""The plainest mesh: layers cut over tensor ranks, stages over pipeline ranks, samples over data ranks. By hand.

Each stage is two matrices, tanh(x @ first) @ second. A tensor rank has some columns of the first and the same rows of
the second, so that the stage's output is a sum over tensor ranks. Every axis has one question, and one call for it:

    tensor      What is my layer's output?          sum the parts of it, forward; sum its input's gradients, backward
    pipeline    What comes into my stage?           receive it, send the output on; gradients go back the same way
    data        What is the whole batch's gradient? average, over those who hold the same part of the same stage

`Hybrid` does this for a GPT, with micro-batches, experts, long sequences and sharded states.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.p2p import group_rank
from distlab.tensor_parallel import copy_to_ranks, reduce_from_ranks


def plain_mesh_step(
    first: Tensor, second: Tensor, x: Tensor, target: Tensor, groups: Mapping[str, ProcessGroup]
) -> Tensor:
    """Run forward and backward of a batch; the weights' `.grad` is that of the mean square error over the whole batch.

    Args:
        first: this rank's columns of its stage's first matrix; a leaf that requires grad.
        second: the same rows of its second matrix.
        x: this replica's samples; the first stage reads them.
        target: what the last stage is to make of them.
        groups: along "data", "tensor" and "pipeline", the ranks that differ from this one on that axis alone.

    Returns:
        The mean loss over the whole batch, on every rank.

    Shapes: first [H, F/t], second [F/t, H], x [B/d, H], target [B/d, H] -> []
    Cost: per rank B/d H elements are summed over tensor in forward, and as many in backward. As many go to the next
        stage, and to the one before. This rank's weights are averaged over data once.
    """
    data, tensor, pipeline = groups["data"], groups["tensor"], groups["pipeline"]
    stage, last = group_rank(pipeline), dist.get_world_size(pipeline) - 1
    if stage > 0:
        x = torch.empty_like(x)
        dist.recv(x, group=pipeline, group_src=stage - 1)
    x = x.detach().requires_grad_()
    hidden = torch.tanh(copy_to_ranks(x, tensor) @ first)
    output = reduce_from_ranks(hidden @ second, tensor)
    loss = (output - target).square().mean()
    if stage == last:
        loss.backward()
    else:
        gradient = torch.empty_like(output)
        dist.send(output.detach(), group=pipeline, group_dst=stage + 1)
        dist.recv(gradient, group=pipeline, group_src=stage + 1)
        output.backward(gradient)
    if stage > 0:
        assert x.grad is not None, "the stage uses its input"
        dist.send(x.grad, group=pipeline, group_dst=stage - 1)
    loss = loss.detach()
    dist.broadcast(loss, group=pipeline, group_src=last)
    for value in (loss, first.grad, second.grad):
        assert value is not None, "backward has reached both matrices"
        dist.all_reduce(value, group=data)
        value /= dist.get_world_size(data)
    return loss
