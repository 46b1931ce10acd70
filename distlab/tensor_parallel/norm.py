"""The norm of gradients, and clipping by it, where ranks hold parts of some parameters and the whole of others.

The squares of parts are summed over ranks. A parameter that every rank holds whole has the same gradient on all: summed
with the others it would count t times, so one rank counts it for all.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.clip import EPSILON, HALF, NotFiniteError
from distlab.comm.p2p import group_rank
from distlab.tensor_parallel.split import splits_of


@torch.no_grad()
def tensor_parallel_norm(model: nn.Module, group: ProcessGroup | None = None) -> Tensor:
    """Return the norm that one process would find for the gradients of the whole model; equal on every rank.

    Cost: an all-reduce of 8 bytes.
    Error: as one process', up to the order of additions.
    """
    split, counts_whole = splits_of(model), group_rank(group) == 0
    gradients = [
        p.grad for name, p in model.named_parameters() if p.grad is not None and (name in split or counts_whole)
    ]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    square = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        dtype = torch.float32 if gradient.dtype in HALF else gradient.dtype
        square += torch.linalg.vector_norm(gradient, dtype=dtype).double().square()
    if dist.get_world_size(group) > 1:
        dist.all_reduce(square, group=group)
    return square.sqrt()


@torch.no_grad()
def clip_tensor_parallel_(
    model: nn.Module, max_norm: float, group: ProcessGroup | None = None, *, check_finite: bool = True
) -> Tensor:
    """Scale gradients in place so that the whole model's norm is at most `max_norm`; return the norm that it had.

    Cost: as `tensor_parallel_norm`.

    Raises:
        ValueError: max_norm is not a positive number.
        NotFiniteError: the norm is not finite, on every rank; nothing is changed.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; pass a positive number")
    norm = tensor_parallel_norm(model, group)
    if check_finite and not math.isfinite(norm.item()):
        bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        where = f"not finite on this rank: {', '.join(bad)}" if bad else "every gradient of this rank is finite"
        raise NotFiniteError(
            f"rank {group_rank(group)}: the norm of the gradients is {norm.item()}; {where}. Skip the update, or lower "
            "the learning rate"
        )
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad))
    return norm
