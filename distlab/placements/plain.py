"""The plainest placements: one tensor on one axis of ranks, in three ways, and the step between each two of them.

What a rank has is a part ("S"), a copy ("R") or a summand ("P"). Parts are of dim 0 and of one length here. The table
in `redistribute` is the whole idea: each change is one collective, or none, and its gradient is the change between the
gradients' placements, where R and P have changed places. Under it, a model that is cut tensor by tensor.

Symbols: n ranks; E elements of the whole tensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.func import functional_call


def redistribute_plainly(local: Tensor, before: str, after: str, group: ProcessGroup | None = None) -> Tensor:
    """Return what this rank holds after a change between "S", "R" and "P".

    Shapes: S [L/n, ...], R and P [L, ...]
    Cost: S to R, P to S: (n-1)/n E elements sent per rank; P to R: 2 (n-1)/n E; all others nothing.
    Error: exact where nothing is summed.

    Raises:
        ValueError: a placement that is none of the three, or rows that the ranks do not divide; nothing was sent then.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if not {before, after} <= {*"SRP"} or (before != "S" and len(local) % num_ranks):
        raise ValueError(
            f"{len(local)} rows on {num_ranks} ranks, from {before!r} to {after!r}; pass S, R or P, and rows that the "
            "ranks divide (distlab.placements.redistribute takes any)"
        )
    rows = len(local) if before == "S" else len(local) // num_ranks
    mine = slice(rank * rows, (rank + 1) * rows)
    made = local.clone()
    match before + after:
        case "SR":  # collect the parts
            made = local.new_empty(num_ranks * rows, *local.shape[1:])
            dist.all_gather(list(made.split(rows)), local.contiguous(), group=group)
        case "PR":  # add the summands
            dist.all_reduce(made, group=group)
        case "PS":  # add the summands, each rank its own part
            made = torch.empty_like(local[mine])
            dist.reduce_scatter(made, list(local.contiguous().split(rows)), group=group)
        case "RS":  # forget the other parts
            made = local[mine].clone()
        case "RP":  # one copy counts
            made = local.clone() if rank == 0 else torch.zeros_like(local)
        case "SP":  # the own part counts
            made = local.new_zeros(num_ranks * rows, *local.shape[1:])
            made[mine] = local
    return made


class WholeTensor(torch.autograd.Function):
    """A tensor out of the ranks' rows of it; in backward the mean of its gradients, this rank's rows alone."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, num_rows: int, group: ProcessGroup | None) -> Tensor:
        """Gather the rows."""
        ctx.group, ctx.shape = group, part.shape
        num_ranks = dist.get_world_size(group)
        longest = -(-num_rows // num_ranks)  # short parts are padded: a collective wants equal ones
        whole = part.new_empty(num_ranks * longest, *part.shape[1:])
        dist.all_gather(list(whole.split(longest)), _padded(part, longest), group=group)
        return whole[:num_rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Sum over the ranks, keep the own rows, divide."""
        num_ranks = dist.get_world_size(ctx.group)
        longest = -(-len(gradient) // num_ranks)
        own = gradient.new_empty(longest, *ctx.shape[1:])
        dist.reduce_scatter(own, list(_padded(gradient, num_ranks * longest).split(longest)), group=ctx.group)
        return own[: ctx.shape[0]] / num_ranks, None, None


def cut_plainly(model: nn.Module, group: ProcessGroup | None = None) -> dict[str, nn.Parameter]:
    """Return this rank's rows of each parameter, by torch.chunk's rule: some ranks may have short ones, or none.

    A part is a parameter of its own: one may be frozen, and each may have its own optimizer.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    parts = {}
    for name, whole in model.named_parameters():
        longest = -(-len(whole) // num_ranks)
        rows = whole.detach()[rank * longest : (rank + 1) * longest].clone()
        parts[name] = nn.Parameter(rows, requires_grad=whole.requires_grad)
    return parts


def call_plainly(model: nn.Module, parts: dict[str, nn.Parameter], *inputs: Any, group: ProcessGroup | None) -> Any:
    """Call a model whose parameters are cut tensor by tensor; backward leaves the mean gradient of each part.

    Cost: an all-gather for each parameter; in backward a reduce-scatter for each that trains.
    """
    lengths = {name: len(whole) for name, whole in model.named_parameters()}
    whole = {
        name: WholeTensor.apply(part, lengths[name], group)  # type: ignore[no-untyped-call]
        for name, part in parts.items()
    }
    return functional_call(model, whole, inputs)


def _padded(part: Tensor, num_rows: int) -> Tensor:
    return torch.cat([part, part.new_zeros(num_rows - len(part), *part.shape[1:])])
