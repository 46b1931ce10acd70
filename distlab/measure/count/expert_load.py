"""How unevenly tokens fell on the ranks that share experts, and a workload as its busiest rank has it.

Only a balance loss makes a router choose evenly: without one a few updates are enough for two experts to get all
tokens. The others wait in the exchange, so a layer of experts takes as long as on the rank with the most tokens. The
routing is not a duration; it is taken from the timed steps.

A rank that computes while the others wait is faster than one among many that compute, where they share cores, caches or
memory: how much faster is measured. At n times the speed of a rank among n an uneven load would cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from distlab.expert_parallel import Load
from distlab.measure.machine.ranks import now, on_first_rank
from distlab.measure.machine.speed import REFERENCES
from distlab.plan import Layer, Plan, Workload, split_evenly

STEPS, REPEATS = 2, 3


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


def measure_alone_speedup(device: torch.device) -> float:
    """Return how many times faster a rank computes while all others wait; every rank calls this.

    Returns:
        The same number on each rank: from 1 (nothing is shared) to their number (all ranks share one core).
    """
    _, _, loss = REFERENCES[2].build(device)

    def compute() -> float:
        begin = now(device)
        for _ in range(STEPS):
            loss().backward()
        return now(device) - begin

    compute()
    pairs = []
    for _ in range(REPEATS):
        dist.barrier()
        together_s = compute()
        dist.barrier()
        alone_s = compute() if dist.get_rank() == 0 else 0.0
        dist.barrier()
        pairs.append((together_s, alone_s))
    return on_first_rank(lambda: min(max(1.0, median(a / b for a, b in pairs)), float(dist.get_world_size())))


def with_expert_loads(
    workload: Workload, loads: Sequence[float], plan: Plan, *, alone_speedup: float = 1.0
) -> Workload:
    """Return the workload with each layer's experts busier by a factor; () leaves it as it is.

    Args:
        workload: counted with even loads.
        loads: of each layer of experts, as `expert_loads` returns them.
        plan: whose ranks share the experts.
        alone_speedup: how many times faster a rank is while the others wait.
    """
    if not loads or plan.expert == 1:
        return workload
    num_ranks = plan.expert
    felt = max(
        0.0, (num_ranks / alone_speedup - 1) / (num_ranks - 1)
    )  # of what the busiest rank has more than its share
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
