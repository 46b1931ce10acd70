"""Clip gradients by their true global norm.

The norm is that of all gradients seen as one long vector, and is the same number that one process with the whole batch
would compute. Data parallelism gets it for nothing: once gradients are averaged, every rank holds all of them, so the
norm of what it holds *is* the global one. Clipping before averaging is not the same (each rank would scale by a number
of its own). Where ranks hold different parts of the model, each norm is of a part: squares are summed over those ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.flat import same_kind
from distlab.comm.agree import group_device

HALF = (torch.float16, torch.bfloat16)
EPSILON = 1e-6  # torch's, so that results can be compared


class Gradient(NamedTuple):
    """A gradient, or the piece of it that is here.

    Attributes:
        name: of the parameter in the whole model.
        values: complete: of the batch of all ranks.
        counts: whether this rank is the one of all that hold equal copies that counts it in the norm.
    """

    name: str
    values: Tensor
    counts: bool


class NotFiniteError(RuntimeError):
    """A gradient is NaN or infinite."""


def clip_gradients_(
    parameters: Iterable[nn.Parameter | tuple[str, nn.Parameter]], max_norm: float, *, check_finite: bool = True
) -> Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm`; return the norm that they had.

    Every rank holds all gradients, averaged. A parameter counts once, however often it is given (tied); one without a
    gradient does not count.

    Args:
        parameters: of the model, or `model.named_parameters()`, which gives errors their names.
        max_norm: the norm to keep; infinity only measures.
        check_finite: refuse a norm that is NaN or infinite, and change nothing.

    Cost: nothing is sent. Two passes over the gradients, the second also where nothing is clipped (no host waits for a
        device to know, with check_finite=False).
    Error: as torch.nn.utils.clip_grad_norm_ of one process, up to the order of additions.

    Raises:
        ValueError: max_norm is not a positive number, or a gradient is sparse.
        NotFiniteError: the norm is not finite; the text names parameters.

    Source: Pascanu et al. 2013, On the difficulty of training recurrent neural networks, section 3.2.
    """
    found: dict[int, Gradient] = {}
    for index, given in enumerate(parameters):
        name, parameter = given if isinstance(given, tuple) else (f"parameter {index} {list(given.shape)}", given)
        if parameter.grad is None:
            continue
        if parameter.grad.layout is not torch.strided:
            raise ValueError(f"{name} has a sparse gradient; build the layer with sparse=False")
        found.setdefault(id(parameter), Gradient(name, parameter.grad.detach(), True))
    return clip_counted_(found.values(), max_norm, (), check_finite=check_finite)


@torch.no_grad()
def counted_norm(gradients: Iterable[Gradient], groups: Sequence[ProcessGroup | None]) -> Tensor:
    """Return the norm that one process would find for the gradients of the whole model; half is squared in float32.

    Args:
        gradients: what is here.
        groups: over which ranks to sum, one after the other: the axes of a grid; None is all ranks.

    Shapes: [...] each -> [], float64
    Cost: an all-reduce of 8 bytes for each group.
    Error: as one process', up to the order of additions; the same bits on every rank.
    """
    squares = []
    for same in same_kind(values for _, values, counts in gradients if counts):
        dtype = torch.float32 if same[0].dtype in HALF else same[0].dtype
        squares.append(torch.stack(torch._foreach_norm(same, 2, dtype=dtype)).double().square().sum())
    device = group_device(groups[0]) if groups else squares[0].device if squares else torch.device("cpu")
    square = torch.zeros((), dtype=torch.float64, device=device)
    for one in squares:
        square += one.to(device)
    for group in groups:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(square, group=group)
    return square.sqrt()


@torch.no_grad()
def clip_counted_(
    gradients: Iterable[Gradient], max_norm: float, groups: Sequence[ProcessGroup | None], *, check_finite: bool = True
) -> Tensor:
    """Scale all gradients in place so that the whole model's norm is at most `max_norm`; return what it was.

    Cost: as `counted_norm`.

    Raises:
        ValueError: max_norm is not a positive number.
        NotFiniteError: on every rank, naming parameters and ranks: the norm is not finite; nothing is changed.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; pass a positive number")
    here = list(gradients)
    norm = counted_norm(here, groups)
    if check_finite and not math.isfinite(norm.item()):
        raise NotFiniteError(_explain(here, norm.item(), groups))
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for same in same_kind(values for _, values, _ in here):
        kind = torch.float32 if same[0].dtype in HALF else same[0].dtype
        torch._foreach_mul_(same, factor.to(same[0].device, kind))
    return norm


def _explain(here: Sequence[Gradient], norm: float, groups: Sequence[ProcessGroup | None]) -> str:
    """Say which gradients are not finite, and on which ranks where several have a part."""
    told = {dist.get_rank() if groups else 0: sorted({name for name, g, _ in here if not g.isfinite().all()})}
    for group in groups:
        everyone: list[dict[int, list[str]]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, told, group=group)
        told = {rank: names for one in everyone for rank, names in one.items()}
    ranks = [(", ".join(names), f" (rank {rank})" if groups else "") for rank, names in sorted(told.items()) if names]
    found = "; ".join(map("".join, ranks)) or "the sum of squares, which overflows"
    return f"the norm of the gradients is {norm}; not finite: {found}. Skip the update, or lower the learning rate"
