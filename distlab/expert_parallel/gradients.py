"""Gradients of a model with experts: what ranks must average, what is complete, and the norm of both.

The step's loss is the mean over ranks of each rank's loss. A parameter that every rank holds (router, attention) has
the gradient of its own rank's loss, so those are averaged. An expert's one owner has heard from all ranks' tokens: its
gradient is the sum already, and only has to be divided. Averaged like the others it would be lost among experts that
are not the same; left alone it would be n times too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.clip import Gradient, clip_counted_
from distlab.blocks.gradients.flat_gradients import sum_and_divide
from distlab.blocks.replicate import every_parameter
from distlab.comm.p2p import group_rank
from distlab.expert_parallel.layer import ExpertParallel


def split_parameters(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return by name what every rank holds, and this rank's experts; without parameters that are frozen.

    An expert of a layer whose group is of one rank counts as one too.
    """
    ids = {id(p) for layer in _layers(model) for p in layer.experts.parameters()}
    named = {name: p for name, p in every_parameter(model) if p.requires_grad}
    replicated = {name: p for name, p in named.items() if id(p) not in ids}
    return replicated, {name: p for name, p in named.items() if id(p) in ids}


@torch.no_grad()
def reduce_gradients(
    model: nn.Module, group: ProcessGroup | None = None, *, replicas: ProcessGroup | None = None
) -> None:
    """Turn gradients of each rank's loss into those of the mean of the ranks' losses, in place.

    Where ranks have unequal numbers of tokens, first multiply each rank's mean loss by n times its share of all tokens.

    Args:
        model: holds `ExpertParallel` layers of this group.
        group: the ranks over which experts are split.
        replicas: ranks of other such groups that hold the same experts; None where there is one group.

    Cost: per dtype and group one all-reduce of the replicated parameters' elements, and of one flag per parameter.
        Experts send nothing, or with replicas one all-reduce of their elements over those.
    Error: a parameter without a gradient on every rank keeps None; where only some have one, the others count as zero.

    Raises:
        ValueError: a layer's experts are split over other ranks; before communicating.
    """
    _check(model, group)
    more = [] if replicas is None else [replicas]
    total = math.prod(map(dist.get_world_size, [group, *more]))
    replicated, experts = split_parameters(model)
    sum_and_divide([*replicated.values()], [group, *more], total)
    sum_and_divide([*experts.values()], more, total)


def clip_gradients_(model: nn.Module, max_norm: float, group: ProcessGroup | None = None) -> Tensor:
    """Scale gradients in place so that the norm of the whole model's is at most `max_norm`; return what it was.

    Replicated parameters, the same on all ranks, count once; experts are summed over ranks. Call it after
    `reduce_gradients`.

    Cost: one all-reduce of 8 bytes.

    Raises:
        ValueError: max_norm is not a positive number, or a layer's experts are split over other ranks.
        NotFiniteError: on every rank, naming parameters and ranks: the norm is not finite.
    """
    _check(model, group)
    replicated, experts = split_parameters(model)
    counts = group_rank(group) == 0  # one rank counts what all of them hold
    held = [(name, parameter, counts) for name, parameter in replicated.items()]
    held += [(name, parameter, True) for name, parameter in experts.items()]
    gradients = [Gradient(name, one.grad, is_counted) for name, one, is_counted in held if one.grad is not None]
    norm = clip_counted_(gradients, max_norm, [group])
    like = max((one.values for one in gradients), key=lambda one: one.dtype.itemsize, default=torch.zeros(()))
    return norm.to(like.device, torch.promote_types(like.dtype, torch.float32))


def _check(model: nn.Module, group: ProcessGroup | None) -> None:
    """Refuse a group that is not the layers' own.

    Raises:
        ValueError: naming both.
    """
    ranks = _ranks(group)
    for layer in _layers(model):
        if (own := _ranks(layer.group)) != ranks:
            raise ValueError(
                f"rank {dist.get_rank()}: experts are split over ranks {own}, and the group given has {ranks}; "
                "pass the layers' own group"
            )


def _ranks(group: ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def _layers(model: nn.Module) -> Iterator[ExpertParallel]:
    return (module for module in model.modules() if isinstance(module, ExpertParallel))
