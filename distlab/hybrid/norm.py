"""The norm of all gradients over a mesh, and clipping by it: each element of the model counted once.

It is where axes meet, and where real libraries went wrong:

| of this axis                     | forgotten                                   | so that                     |
|----------------------------------|---------------------------------------------|-----------------------------|
| pipeline: another part           | norm of the own stage alone                 | under-clips; stages differ  |
| tensor: parts, and equal copies  | equal copies counted once a rank            | over-clips                  |
| tensor: parts, and equal copies  | norm of the own part alone                  | ranks scale by other numbers|
| expert: other experts            | own experts alone                           | copies of the rest drift    |
| data, context: equal copies      | summed like parts                           | over-clips by sqrt(n)       |
| data, sharded: pieces            | norm of the own shard alone                 | copies drift                |
| tied weights on two stages       | counted on both                             | over-clips                  |

One rule covers all: of all ranks that hold equal copies of an element one counts it; then squares are summed over the
whole mesh, and every rank has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.clip import EPSILON, HALF, NotFiniteError
from distlab.comm.agree import group_device
from distlab.hybrid.gradients import Gradient


@torch.no_grad()
def mesh_norm(gradients: Iterable[Gradient], group: ProcessGroup) -> Tensor:
    """Return the norm that one process would find for the gradients of the whole model.

    Cost: an all-reduce of 8 bytes.
    Error: as one process', up to the order of additions; the same bits on every rank.
    """
    square = torch.zeros((), dtype=torch.float64, device=group_device(group))
    for _, values, counts in gradients:
        if counts:
            dtype = torch.float32 if values.dtype in HALF else values.dtype
            square += torch.linalg.vector_norm(values, dtype=dtype).double().square().to(square.device)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(square, group=group)
    return square.sqrt()


@torch.no_grad()
def clip_on_mesh_(gradients: Iterable[Gradient], max_norm: float, group: ProcessGroup) -> Tensor:
    """Scale all gradients in place so that the whole model's norm is at most `max_norm`; return what it was.

    Cost: as `mesh_norm`.

    Raises:
        ValueError: max_norm is not a positive number.
        NotFiniteError: on every rank, naming parameters and ranks: the norm is not finite; nothing is changed.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; pass a positive number")
    here = list(gradients)
    norm = mesh_norm(here, group)
    if not math.isfinite(norm.item()):
        bad = sorted({name for name, values, _ in here if not values.isfinite().all()})
        told: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(told, bad, group=group)
        ranks = dist.get_process_group_ranks(group)
        found = "; ".join(f"{', '.join(names)} (rank {rank})" for rank, names in zip(ranks, told, strict=True) if names)
        raise NotFiniteError(
            f"the norm of the gradients is {norm.item()}; not finite: {found or 'the sum of squares'}. Skip the "
            "update, or lower the learning rate"
        )
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for _, values, _ in here:
        values.mul_(factor.to(values.device, values.dtype))
    return norm
