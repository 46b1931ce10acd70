"""Reference solutions of lesson 10: what a rank works on and sums with whom, and how one tensor lies on a mesh.

A mesh is a dict of axes and sizes, slowest to fastest: on {"pipeline": 2, "data": 2, "tensor": 2} ranks 0 and 1 differ
in their place on the tensor axis, ranks 0 and 4 in their stage.
The library's versions are `distlab.hybrid` (a whole step on any mesh) and `distlab.placements`.
"""

from itertools import permutations
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.placements import Partial, Placement, Replicate, Shard
from distlab.plan import Mesh


def my_part(batch: Tensor, rank: int, mesh: Mesh, num_microbatches: int) -> list[Tensor]:
    """Return what a rank works on: its samples, of these its positions, cut into micro-batches by samples.

    Along data and expert, ranks take different samples; along context, different positions, as one piece each; along
    tensor and pipeline they work on the same. Every position of every sample is worked on once. All sizes divide.

    Shapes: batch [B, S] -> num_microbatches times [B / (data expert num_microbatches), S / context]
    """
    axes, place = dict(mesh.axes), mesh.coordinates(rank)
    replica = place["data"] * axes["expert"] + place["expert"]
    own = batch.chunk(axes["data"] * axes["expert"])[replica]
    own = own.chunk(axes["context"], dim=1)[place["context"]]
    return list(own.chunk(num_microbatches))


def gradient_axes(kind: str, axes: dict[str, int], sequence_parallel: bool) -> tuple[list[str], int]:
    """Return the axes over which a parameter's gradient is summed, and the number by which the sum is divided.

    Each rank's loss is the mean over its own positions; the gradient is to be that of the mean over the whole batch.
    The mesh has the axes pipeline, data, expert, context and tensor. A parameter is of one of these kinds:

    - "matrix": cut over the tensor axis, each rank holds a part of its own;
    - "norm": whole on every tensor rank. They all work on the same positions there, and each finds the whole gradient;
      with sequence_parallel each works on its own part of the positions;
    - "tied": cut like a matrix, and used twice: as the embedding in the first stage, as the output layer in the last;
    - "expert": a matrix of an expert, which one rank of the expert axis holds and to which all of them send tokens.
    """
    summed = ["data", "expert", "context"]
    if kind == "expert":
        summed.remove("expert")
    if kind == "norm" and sequence_parallel:
        summed.append("tensor")
    if kind == "tied":
        summed.append("pipeline")
    return summed, axes["data"] * axes["expert"] * axes["context"]


def global_norm(
    gradients: dict[str, Tensor], split_over: dict[str, list[str]], groups: dict[str, dist.ProcessGroup]
) -> Tensor:
    """Return the norm of the whole model's gradient, each element counted once; the same on every rank.

    `gradients` are those that this rank holds, already averaged; ranks of a different stage hold others, and a
    different number of them. `split_over[name]` are the axes along which ranks hold different parts; along all other
    axes of `groups` they hold copies.

    Squares are added up in float64.

    Cost: an all-reduce of one number per axis.
    """
    square = torch.zeros((), dtype=torch.float64)
    for name, gradient in gradients.items():
        copies = prod(group.size() for axis, group in groups.items() if axis not in split_over[name])
        square += gradient.square().sum() / copies
    for group in groups.values():
        dist.all_reduce(square, group=group)
    return square.sqrt()


def place_axes(axes: dict[str, int], traffic: dict[str, float], devices_per_node: int) -> list[str]:
    """Return the axes in the order, slowest to fastest, in which the fewest bytes per rank cross between nodes.

    Ranks are numbered node by node. `traffic[axis]` is what a rank sends along the axis in a step. If a group of the
    axis has ranks of several nodes, all of it counts: a ring is as slow as its slowest wire. An axis of size 1 sends
    nothing. All sizes, and the devices of a node, are powers of two.
    """

    def crossing(order: tuple[str, ...]) -> float:
        reach, sent = 1, 0.0
        for axis in reversed(order):  # the fastest first: its ranks are next to each other
            reach *= axes[axis]
            if axes[axis] > 1 and reach > devices_per_node:
                sent += traffic[axis]
        return sent

    return list(min(permutations(axes), key=crossing))


def redistribute_axis(local: Tensor, before: Placement, after: Placement, group: dist.ProcessGroup) -> Tensor:
    """Return what this rank holds of a tensor that lies as `after` on the group's ranks, from what it holds before.

    `Shard(dim)`: this rank's part of a dim, all parts of one size; `Replicate()`: all of it; `Partial()`: one summand.
    Nothing becomes Partial that is not. `local` stays as it is; a result may share its memory.

    Cost: bytes sent per rank, of S bytes of the whole tensor on n ranks: S(d) -> R and P -> S(d) (n-1)/n S, P -> R
        2 (n-1)/n S, S(d) -> S(e) (n-1)/n of S/n; R -> S(d), and what stays as it is, 0.
    """
    n, rank = group.size(), group.rank()
    if before == after:
        return local
    if before == Replicate():
        return local.chunk(n, after.dim)[rank]
    if after == Replicate() and before == Partial():
        total = local.clone()
        dist.all_reduce(total, group=group)
        return total
    if after == Replicate():
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(n)]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts, before.dim)
    pieces = [piece.contiguous() for piece in local.chunk(n, after.dim)]  # piece i is for rank i
    if before == Partial():
        own = torch.empty_like(pieces[0])
        dist.reduce_scatter(own, pieces, group=group)
        return own
    leaving = torch.cat(pieces)
    arrived = torch.empty_like(leaving)
    dist.all_to_all_single(arrived, leaving, group=group)
    return torch.cat(arrived.chunk(n), before.dim)


def missing_sum(program: list[tuple[str, ...]], layouts: dict[str, Placement]) -> tuple[int, str] | None:
    """Return the first line that takes a Partial for the whole, and the name to sum before it; None if there is none.

    A line is (result, operation, names): ("y", "matmul", "x", "w"). Lines count from 0; of two names, the left one.
    Operands are matrices; `layouts` says how each input lies on one axis. Nothing is wrong but sums that are missing:

    - "matmul": where columns of the left one and rows of the right one are cut, each rank has a summand. Else what is
      cut stays cut: rows of the left one, or columns of the right one.
    - "add": of two that lie alike. "relu": element by element. "sum": of all elements; where they are cut, each rank
      has a summand. "all_reduce": makes a Partial whole.

    What the last line makes shall be no Partial either: for such a program return len(program) and its name.
    """
    whole, summand = Replicate(), Partial()
    passes = {  # where the sum may come later as well
        ("add", summand, summand): summand,
        ("matmul", summand, whole): summand,
        ("matmul", whole, summand): summand,
        ("sum", summand): summand,
        ("all_reduce", summand): whole,
    }
    begins = {("matmul", Shard(1), Shard(0)), ("sum", Shard(0)), ("sum", Shard(1))}
    at = dict(layouts)
    for line, (result, operation, *names) in enumerate(program):
        placed = [at[name] for name in names]
        asked = (operation, *placed)
        if summand in placed and asked not in passes:
            return line, names[placed.index(summand)]
        if asked in passes:
            at[result] = passes[asked]
        elif asked in begins:
            at[result] = summand
        else:  # what is cut stays cut
            at[result] = next((placement for placement in placed if placement != whole), whole)
    return (len(program), result) if at[result] == summand else None


def step_on_mesh(
    first: Tensor, second: Tensor, x: Tensor, target: Tensor, groups: dict[str, dist.ProcessGroup]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss of the whole batch and the gradients of this rank's weights, on a mesh of data and tensor.

    The model is `tanh(x @ first) @ second`; `first` is cut by columns over the tensor ranks, `second` by rows. The loss
    is the mean square of the difference to `target`. Every rank is given the whole batch.

    Shapes: first [H, F/t], second [F/t, H], x [B, H], target [B, H]
    """
    data, tensor = groups["data"], groups["tensor"]
    part, num_parts = dist.get_rank(data), dist.get_world_size(data)
    x, target = x.chunk(num_parts)[part], target.chunk(num_parts)[part]
    hidden = torch.tanh(x @ first)
    output = hidden @ second
    dist.all_reduce(output, group=tensor)
    difference = output - target
    loss, grad = difference.square().mean(), 2 * difference / difference.numel()
    grad_second = hidden.T @ grad
    grad_first = x.T @ (grad @ second.T * (1 - hidden.square()))
    for value in (loss, grad_first, grad_second):
        dist.all_reduce(value, group=data)
        value /= num_parts
    return loss, grad_first, grad_second
