"""Reference solutions of lesson 9: orders of actions as plain text, and one rank of a pipeline that follows an order.

An action is a stage, a kind and a micro-batch: "2F0" is stage 2's forward pass of micro-batch 0, "2B0" its backward
pass; "2I0" and "2W0" are the two halves of "2B0", the gradient of the input and those of the weights.
The library's versions are in `distlab.plan.schedules` (orders) and `distlab.pipeline` (runs any order).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.plan import Action


def gpipe_order(rank: int, num_microbatches: int) -> list[str]:
    """Return what a rank runs, in order, in GPipe: all forward passes, then all backward passes.

    Rank r holds stage r. A list such as ["2F0", "2F1", "2B0", "2B1"] is rank 2's for two micro-batches.
    """
    forward = [f"{rank}F{i}" for i in range(num_microbatches)]
    backward = [f"{rank}B{i}" for i in range(num_microbatches)]
    return forward + backward


def bubble_fraction(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """Return the part of all ranks' time that is idle, in GPipe, 1F1B and interleaved 1F1B.

    Every stage takes the same time and messages take none. With several stages per rank, a stage is that much smaller.
    """
    idle = num_ranks - 1
    busy = stages_per_rank * num_microbatches
    return idle / (busy + idle)


def one_f_one_b_order(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Return what a rank runs, in order, in 1F1B: as long as GPipe, with at most num_ranks - rank in flight.

    A micro-batch is in flight from its forward to its backward pass; for that long its activations are kept.
    """
    warm_up = min(num_ranks - 1 - rank, num_microbatches)
    order = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(num_microbatches):
        if warm_up + i < num_microbatches:
            order.append(f"{rank}F{warm_up + i}")
        order.append(f"{rank}B{i}")
    return order


def run_rank(
    stage: nn.Module,
    actions: list[Action],
    inputs: list[Tensor],
    targets: list[Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    like: Tensor,
) -> float | None:
    """Run one rank of a pipeline: its actions, in order. Rank r holds stage r.

    Gradients end up in the stage's parameters, as of the mean loss of all micro-batches. Return that mean on the last
    rank and None on the others.

    `action.kind` is "F" or "B"; `action.microbatch` counts from 0. Rank 0 alone has `inputs`, the last rank alone
    `targets`, one per micro-batch; elsewhere they are empty. All that is handed over has the shape of `like`.

    Cost: a rank sends each micro-batch's activation forward once and the gradient of each back once.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    num_microbatches = sum(action.kind == "F" for action in actions)
    kept, leaving, total = {}, [], 0.0
    for _, kind, i in actions:
        if kind == "F":
            if rank == 0:
                x = inputs[i]
            else:
                x = torch.empty_like(like)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            y = stage(x)
            if rank == last:
                y = loss_fn(y, targets[i]) / num_microbatches
                total += y.item()
            else:
                leaving.append(dist.isend(y.detach(), rank + 1))
            kept[i] = x, y
        else:
            x, y = kept.pop(i)
            if rank == last:
                y.backward()
            else:
                grad = torch.empty_like(like)
                dist.recv(grad, rank + 1)
                y.backward(grad)
            if rank > 0:
                leaving.append(dist.isend(x.grad, rank - 1))
    for work in leaving:
        work.wait()
    return total if rank == last else None


def forward_all(stage: nn.Module, inputs: list[Tensor], num_microbatches: int, like: Tensor) -> list[Tensor]:
    """Run micro-batches forward through all stages; every rank returns the last stage's outputs, in order.

    Rank r holds stage r; rank 0 alone has `inputs`. What is handed over, and the output, have the shape of `like`.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    outputs, leaving = [], []
    for i in range(num_microbatches):
        x = torch.empty_like(like)
        if rank == 0:
            x = inputs[i]
        else:
            dist.recv(x, rank - 1)
        y = stage(x).detach()
        if rank < last:
            leaving.append(dist.isend(y, rank + 1))
        outputs.append(y)
    for work in leaving:
        work.wait()
    for y in outputs:
        dist.broadcast(y, last)
    return outputs


def split_backward(
    weights: list[Tensor], activations: list[Tensor], grad: Tensor
) -> tuple[Tensor, Callable[[], list[Tensor]]]:
    """Return the gradient of a stage's input now, and a function that computes those of its weights when it is called.

    The stage is layers of `activations[k + 1] = tanh(activations[k] @ weights[k])`. `grad` is the gradient of the last
    activation. Cost: one product of matrices per layer now, one per layer later.

    Shapes: weights[k] [H, H]; activations [B, H], one more than there are layers; grad [B, H]
    """
    later = []
    for k in reversed(range(len(weights))):
        grad = grad * (1 - activations[k + 1].square())
        later.append((activations[k], grad))
        grad = grad @ weights[k].T

    def weight_gradients() -> list[Tensor]:
        return [x.T @ inner for x, inner in reversed(later)]

    return grad, weight_gradients


def zero_bubble_order(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Return what a rank runs, in order, in a schedule like ZB-H1: actions F, I and W, at most num_ranks in flight.

    With F, I and W equally long, and at least as many micro-batches as ranks, a step takes 3 num_microbatches +
    num_ranks - 1 of them, where 1F1B takes 3 num_microbatches + 3 (num_ranks - 1). Here a micro-batch is in flight from
    its F to its W.
    """
    warm_up = min(num_ranks - 1 - rank, num_microbatches)
    order = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(num_microbatches):
        if warm_up + i < num_microbatches:
            order.append(f"{rank}F{warm_up + i}")
        order.append(f"{rank}I{i}")
        if i >= rank:
            order.append(f"{rank}W{i - rank}")
    return order + [f"{rank}W{i}" for i in range(max(num_microbatches - rank, 0), num_microbatches)]
