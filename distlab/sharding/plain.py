"""The plainest fully sharded training: gather, compute, free; gather, backward, reduce-scatter. Nothing overlaps.

A model is a list of modules, each fed with what the one before it made. Here each rank keeps of every module only a
shard, one part of a flat row that holds all its parameters. Between two modules nothing is kept but the activation, so
backward computes each module's forward again (`FullyShard` keeps what autograd saved, and has no need to).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.func import functional_call

from distlab.plan import FlatLayout
from distlab.sharding.calls import gather_into, scatter_sum


def layout_of(module: nn.Module, num_ranks: int) -> FlatLayout:
    """Return where a module's parameters lie when they are put end to end and cut into shards."""
    named = dict(module.named_parameters())
    return FlatLayout(tuple(named), tuple(tuple(p.shape) for p in named.values()), num_ranks)


@torch.no_grad()
def cut_shard(module: nn.Module, group: ProcessGroup | None = None) -> nn.Parameter:
    """Return this rank's shard of a module's parameters, which are the same on all ranks."""
    layout = layout_of(module, dist.get_world_size(group))
    start, stop = layout.bounds(dist.get_rank(group))
    return nn.Parameter(_flat([p.detach() for p in module.parameters()], layout)[start:stop].clone())


def plain_step(
    modules: Sequence[nn.Module],
    shards: Sequence[nn.Parameter],
    inputs: Tensor,
    loss_fn: Callable[[Tensor], Tensor],
    *,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Run forward and backward; afterwards each shard's gradient is its part of the mean over ranks.

    The optimizer then updates the shards: SGD(shards), Adam(shards). Parameters of the modules themselves are not read.

    Args:
        modules: each fed with what the one before it made.
        shards: of `cut_shard`, one per module.
        inputs: of the first module, this rank's.
        loss_fn: of what the last module makes.
        group: the ranks.

    Shapes: inputs as the first module wants them -> []
    Cost: for each module two all-gathers and a reduce-scatter: 3 (n-1)/n of its padded bytes sent per rank.
    """
    num_ranks = dist.get_world_size(group)
    x, before = inputs, []
    for module, shard in zip(modules, shards, strict=True):
        before.append(x)
        with torch.no_grad():
            x = functional_call(module, _gather(module, shard, group), x)  # freed at the next
    x.requires_grad_()
    loss = loss_fn(x)
    (gradient,) = torch.autograd.grad(loss, x)
    for module, shard, x in zip(reversed(modules), reversed(shards), reversed(before), strict=True):
        parameters = {name: p.requires_grad_() for name, p in _gather(module, shard, group).items()}
        x = x.detach().requires_grad_(x.is_floating_point())
        made = functional_call(module, parameters, x)
        wanted = [*parameters.values(), *([x] if x.requires_grad else [])]
        found = torch.autograd.grad(made, wanted, gradient)
        gradient = found[-1]
        flat = _flat(found[: len(parameters)], layout_of(module, num_ranks))
        shard.grad = torch.empty_like(shard)
        scatter_sum(flat, shard.grad, group)
        shard.grad.div_(num_ranks)
    return loss.detach()


def _gather(module: nn.Module, shard: Tensor, group: ProcessGroup | None) -> dict[str, Tensor]:
    """Return a module's whole parameters, as views of a new flat row."""
    layout = layout_of(module, dist.get_world_size(group))
    full = shard.new_empty(layout.padded_size)
    gather_into(full, shard.detach(), group)
    parts = full.split([*layout.sizes, layout.padded_size - layout.num_elements])
    return {
        name: part.view(shape).detach() for name, part, shape in zip(layout.names, parts, layout.shapes, strict=False)
    }


def _flat(tensors: Sequence[Tensor], layout: FlatLayout) -> Tensor:
    """Put tensors end to end, and zeros where the padding is."""
    flat = tensors[0].new_zeros(layout.padded_size)
    torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat[: layout.num_elements])
    return flat
