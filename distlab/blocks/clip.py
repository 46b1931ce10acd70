"""Clip gradients by their true global norm.

The norm is that of all gradients seen as one long vector, and is the same number that one process with the whole batch
would compute. Data parallelism gets it for nothing: once gradients are averaged, every rank holds all of them, so the
norm of what it holds *is* the global one. Clipping before averaging is another thing (each rank would scale by a number
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
    parameters: Iterable[nn.Parameter | tuple[str, nn.Parameter]],
    max_norm: float,
    *,
    group: ProcessGroup | None = None,
    check_finite: bool = True,
) -> Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm`; return the norm that they had.

    A parameter counts once, however often it is given (tied); one without a gradient does not count.

    Args:
        parameters: of the model, or `model.named_parameters()`, which gives errors their names.
        max_norm: the norm to keep; infinity only measures.
        group: ranks that hold *different* parameters, or different shards of them, and clip as one; None where each
            rank holds all gradients, averaged.
        check_finite: refuse a norm that is NaN or infinite, on every rank of the group, and change nothing.

    Cost: without a group nothing is sent. With one: one all-reduce of 8 bytes. Two passes over the gradients, the
        second also where nothing is clipped (no host waits for a device to know).
    Error: as torch.nn.utils.clip_grad_norm_ of one process, up to the order of additions.

    Raises:
        ValueError: max_norm is not a positive number, or a gradient is sparse.
        NotFiniteError: the norm is not finite; the text names parameters, and ranks where there is a group.

    Source: Pascanu et al. 2013, On the difficulty of training recurrent neural networks, section 3.2.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; pass a positive number")
    named = _once(parameters)
    gradients = [p.grad.detach() for p in named.values() if p.grad is not None]
    if group is not None:  # the norm is of all ranks' parts, so a part need not refuse it
        gradients = [one.as_subclass(Tensor) for one in gradients]
    norm = _norm(gradients)
    if group is not None:
        device = torch.device("cuda") if dist.get_backend(group) == "nccl" else norm.device
        square = norm.to(device, torch.float64).square()
        dist.all_reduce(square, group=group)
        norm = square.sqrt().to(norm) if gradients else square.sqrt()  # a rank without gradients knows no type
    if check_finite and not math.isfinite(norm.item()):
        raise NotFiniteError(_explain(named, norm.item(), group))
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for same in same_kind(gradients):
        torch._foreach_mul_(same, factor.to(same[0].device))
    return norm


def _once(parameters: Iterable[nn.Parameter | tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Name the parameters that have a gradient, each once.

    Raises:
        ValueError: a gradient is sparse.
    """
    named: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for index, given in enumerate(parameters):
        name, parameter = given if isinstance(given, tuple) else (f"parameter {index} {list(given.shape)}", given)
        if id(parameter) in seen or parameter.grad is None:
            continue
        if parameter.grad.layout is not torch.strided:
            raise ValueError(f"{name} has a sparse gradient; build the layer with sparse=False")
        seen.add(id(parameter))
        named[name] = parameter
    return named


@torch.no_grad()
def _norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of the norms; half precision is squared in float32, where it cannot overflow."""
    if not gradients:
        return torch.zeros(())
    norms: list[Tensor] = []
    for same in same_kind(gradients):
        dtype = torch.float32 if same[0].dtype in HALF else same[0].dtype
        norms += torch._foreach_norm(same, 2, dtype=dtype)
    dtype = max((one.dtype for one in norms), key=lambda kind: kind.itemsize)
    total: Tensor = torch.stack([one.to(norms[0].device, dtype) for one in norms]).norm()
    return total


def _explain(named: dict[str, nn.Parameter], norm: float, group: ProcessGroup | None) -> str:
    mine = [name for name, p in named.items() if p.grad is not None and not p.grad.as_subclass(Tensor).isfinite().all()]
    found = [mine]
    if group is not None:
        found = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(found, mine, group=group)
    parts = [
        ", ".join(names) + (f" (rank {rank})" if group is not None else "") for rank, names in enumerate(found) if names
    ]
    where = f"not finite: {'; '.join(parts)}" if parts else "every gradient is finite, but the sum of squares overflows"
    return f"the norm of the gradients is {norm}; {where}. Skip the update, or lower the learning rate"


@torch.no_grad()
def counted_norm(gradients: Iterable[Gradient], groups: Sequence[ProcessGroup | None]) -> Tensor:
    """Return the norm that one process would find for the gradients of the whole model.

    Args:
        gradients: what is here.
        groups: over which ranks to sum, one after the other: the axes of a grid; None is all ranks.

    Cost: an all-reduce of 8 bytes for each group.
    Error: as one process', up to the order of additions; the same bits on every rank.
    """
    square = torch.zeros((), dtype=torch.float64, device=group_device(groups[0]))
    for _, values, counts in gradients:
        if counts:
            dtype = torch.float32 if values.dtype in HALF else values.dtype
            square += torch.linalg.vector_norm(values, dtype=dtype).double().square().to(square.device)
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
        told = {dist.get_rank(): sorted({name for name, values, _ in here if not values.isfinite().all()})}
        for group in groups:
            everyone: list[dict[int, list[str]]] = [{} for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(everyone, told, group=group)
            told = {rank: names for one in everyone for rank, names in one.items()}
        found = "; ".join(f"{', '.join(names)} (rank {rank})" for rank, names in sorted(told.items()) if names)
        raise NotFiniteError(
            f"the norm of the gradients is {norm.item()}; not finite: {found or 'the sum of squares'}. Skip the "
            "update, or lower the learning rate"
        )
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for _, values, _ in here:
        values.mul_(factor.to(values.device, values.dtype))
    return norm
