"""How unevenly tokens fell on the ranks that share experts, and a workload as its busiest rank has it.

Only a balance loss makes a router choose evenly: without one a few updates are enough for two experts to get all
tokens. The others wait in the exchange, so a layer of experts takes as long as on the rank with the most tokens. The
routing is not a duration; it is taken from the timed steps.

A rank that computes while the others wait is faster than one among many, where they share cores: it has one to itself
then. At n times the speed of a rank among n an uneven load would cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from distlab.expert_parallel import Load
from distlab.plan import Layer, Plan, Workload, split_evenly


def expert_loads(modules: Iterable[nn.Module], plan: Plan, device: torch.device) -> tuple[float, ...]:
    """Return the busiest rank's tokens over its even share, in the last forward pass; every rank calls this.

    Returns:
        One number per layer of experts, in forward order; () for none. 1 is even; the most is the number of ranks that
        share them.
    """
    loads = [load for module in modules for each in module.modules() if (load := getattr(each, "load", None))]
    kept = [load.kept for load in loads if isinstance(load, Load)]
    if not kept:
        return ()
    counts = torch.tensor(kept, dtype=torch.float64, device=device)  # [layers, experts]
    dist.all_reduce(counts)
    ends = split_evenly(counts.shape[1], plan.expert)
    of_ranks = torch.stack([counts[:, start:stop].sum(1) for start, stop in ends])
    even = counts.sum(1) * max(stop - start for start, stop in ends) / counts.shape[1]
    return tuple((of_ranks.max(0).values / even).tolist())


def with_expert_loads(workload: Workload, loads: Sequence[float], plan: Plan, *, cores: int | None = None) -> Workload:
    """Return the workload with each layer's experts busier by a factor; () leaves it as it is.

    Args:
        workload: counted with even loads.
        loads: of each layer of experts, as `expert_loads` returns them.
        plan: whose ranks share the experts.
        cores: shared by all ranks; None: one core for each.
    """
    if not loads or plan.expert == 1:
        return workload
    faster = max(1.0, plan.world_size / cores) if cores else 1.0  # while the others wait
    felt = max(0.0, (plan.expert / faster - 1) / (plan.expert - 1))  # of what the busiest rank has beyond its share
    left = iter(loads)
    layers = [_busier(layer, 1 + felt * (next(left) - 1)) if layer.experts else layer for layer in workload.layers]
    return replace(workload, layers=tuple(layers))


def _busier(layer: Layer, factor: float) -> Layer:
    experts = layer.experts
    assert experts is not None, "asked for layers with experts alone"
    names = ("forward", "input_gradient", "weight_gradient")
    busier = {name: getattr(experts, name).times(factor) for name in names}
    rest = {name: getattr(layer, name).without(getattr(experts, name)) for name in names}
    return replace(
        layer,
        experts=replace(experts, **busier, row_bytes=round(factor * experts.row_bytes)),
        **{name: rest[name] + busier[name] for name in names},
    )
