"""Time the calls that sharding is made of, so that its steps can be predicted.

The calls are those that training makes, `DirectGather` and `DirectScatter`. Each is timed in parts, since a step pays
for them on different lanes: starting it keeps the computing rank busy, then it travels beside what the rank computes,
and what has arrived of a scatter is added up by the computing rank again. Each part gets a line of its own, since on
one machine they differ by more than the theory of rings says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.collectives import DirectGather, DirectScatter
from distlab.comm.p2p import needs_batches
from distlab.measure.count.module import BACKWARD_KERNELS
from distlab.measure.machine.speed import MESSAGE_BYTES, now
from distlab.plan import Layer, Link, Protocol, Work, Workload
from simulator import fit_steps
from simulator.hardware.cost import Steps, reduce_scatter_steps

Times = tuple[float, ...]
LEAST_S = 1e-9  # a part that takes no time has a line all the same


@dataclass(frozen=True)
class CallTimes:
    """Seconds of the parts of each kind of call at each of MESSAGE_BYTES, as a mean over ranks; () is not measured.

    Attributes:
        all_gather: from its start to the whole of so many bytes.
        reduce_scatter: of so many bytes on each rank, from its start until all parts are there.
        gather_start: starting the gather, on the computing rank.
        scatter_start: starting the scatter, on the computing rank.
        scatter_sum: adding up what arrived, on the computing rank.
        beside: what a gather and a scatter cost a rank that computes beyond all that, whatever their bytes.
    """

    all_gather: Times
    reduce_scatter: Times
    gather_start: Times = ()
    scatter_start: Times = ()
    scatter_sum: Times = ()
    beside: Times = ()


def measure_calls(device: torch.device, group: dist.ProcessGroup | None = None) -> CallTimes:
    """Time the two calls as sharding makes them. Every rank of the group calls it at the same time."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = []
    for size in MESSAGE_BYTES:
        full = torch.zeros(max(1, size // 4 // num_ranks) * num_ranks, device=device)
        own = full.chunk(num_ranks)[rank].clone()
        repeats = max(3, min(8, 8_000_000 // size))
        gather = _mean([_gather(full, own, group) for _ in range(repeats + 1)], group)
        scatter = _mean([_scatter(full, group) for _ in range(repeats + 1)], group)
        rows.append((gather[1], scatter[1], gather[0], scatter[0], scatter[2]))
    means = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.all_reduce(means, group=group)
    return CallTimes(*(tuple(column) for column in (means.T / num_ranks).tolist()))


def median_calls(rows: Sequence[CallTimes]) -> CallTimes:
    """Combine what was measured one after the other."""
    middle = {each.name: np.median([getattr(row, each.name) for row in rows], axis=0) for each in fields(CallTimes)}
    return CallTimes(
        **{name: tuple(float(value) for value in column) for name, column in middle.items() if column.size}
    )


def links_of(times: CallTimes, num_ranks: int) -> dict[str, Link]:
    """Return a line of its own for each part of a call, fitted to its times, under the names that `simulate` takes."""
    if num_ranks == 1:
        return {}
    ring, once = reduce_scatter_steps(num_ranks), Steps(1, 1.0)
    parts = {
        "all_gather": ring,
        "reduce_scatter": ring,
        "all_gather start": once,
        "reduce_scatter start": once,
        "reduce_scatter sum": once,
    }
    links = {}
    *columns, beside = astuple(times)
    for (name, steps), column in zip(parts.items(), columns, strict=True):
        if column:
            seconds = [max(LEAST_S, each) for each in column]
            links[name] = fit_steps(MESSAGE_BYTES, seconds, steps, name=name, source="fitted to timed calls")
    for name, latency_s in zip(("all_gather beside", "reduce_scatter beside"), beside, strict=False):
        links[name] = Link(name, (Protocol(latency_s, 1e18),), "fitted to sharded steps of other models")
    return links


def _gather(full: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> tuple[float, ...]:
    """Make a gather; return the seconds of its start and of the rest."""
    begin = now(full.device)
    call = DirectGather(full, own, group)
    started = _computing_again(full, group)
    call.finish()
    return started - begin, now(full.device) - started


@torch.no_grad()
def _scatter(full: Tensor, group: dist.ProcessGroup | None) -> tuple[float, ...]:
    """Make a scatter; return the seconds of its start, of its way, and of the sum."""
    begin = now(full.device)
    call = DirectScatter(full, group)
    started = _computing_again(full, group)
    call.wait()
    arrived = now(full.device)
    call.finish()
    return started - begin, arrived - started, now(full.device) - arrived


def _computing_again(full: Tensor, group: dist.ProcessGroup | None) -> float:
    """Return when the rank that started a call may compute; with nccl that is at once, since the call is a kernel."""
    return time.perf_counter() if needs_batches(full, group) else now(full.device)


def _mean(rows: Sequence[tuple[float, ...]], group: dist.ProcessGroup | None) -> list[float]:
    """Return the mean of each part, the first call apart: it warms up. Ranks go on together."""
    dist.barrier(group)
    return [float(value) for value in np.mean(rows[1:], axis=0)]


def without_accumulation(workload: Workload) -> Workload:
    """Return the workload without adding gradients to earlier ones: shards take gradients as they come."""

    def taken(layer: Layer) -> Layer:
        adds = Work(memory_bytes=3 * layer.num_parameters * workload.bytes_per_parameter)
        work = layer.weight_gradient
        kernels = max(0, work.num_kernels - BACKWARD_KERNELS * len(layer.parameter_sizes))
        rest = Work(work.matmul_flops, max(0.0, work.memory_bytes - adds.memory_bytes), kernels)
        return replace(layer, weight_gradient=rest)

    return replace(workload, layers=tuple(taken(layer) for layer in workload.layers))
