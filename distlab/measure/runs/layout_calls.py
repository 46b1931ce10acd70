"""Time what ranks of a layout send each other, as the techniques send it, on the groups on which they do.

A mesh has one group an axis and rank, and all groups of an axis are at work at once: on 2 x 2 ranks two tensor groups
sum side by side, and share the wires. So every call is timed with all groups of its axis at once. Which kinds of call
a step makes follows from the plan. Each kind gets a line of its own, since on one machine an all-to-all and the
all-gather of as many bytes differ by more than the theory of rings says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distlab.comm.p2p import Receive, Send, start
from distlab.context_parallel.all_to_all import trade
from distlab.measure.machine.speed import now
from distlab.plan import Link, Plan
from distlab.tensor_parallel.async_calls import SequenceGather, SequenceScatterSum, Sum
from simulator import fit_steps
from simulator.hardware.cost import Steps, all_reduce_steps, reduce_scatter_steps

MESSAGE_BYTES = (4_096, 32_768, 131_072, 524_288, 2_097_152)
ENOUGH_BYTES = 2_000_000  # repeated until so much was sent, within limits
FEW, MANY = 3, 8

Seconds = Mapping[str, tuple[float, ...]]  # of a kind of call, at each of MESSAGE_BYTES


def calls_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Name the kinds of call that a step of the plan makes, and the axes on which to time each: those with most ranks.

    First come those inside of passes, then messages between stages, then those for gradients: an all-reduce along data,
    expert and context; with sharding a gather and a scatter too.
    """
    halves = ("all_gather", "reduce_scatter", "all_reduce")
    kinds = {
        "tensor": halves if plan.sequence_parallel else ("all_reduce",),
        "context": ("send" if plan.context_kind == "ring" else "all_to_all", "all_reduce"),
        "expert": ("all_to_all", "all_reduce"),
        "pipeline": ("send",),
        "data": halves if plan.sharding.stage else ("all_reduce",),
    }
    axes: dict[str, list[str]] = {}
    for axis, each in kinds.items():
        for kind in each if getattr(plan, axis) > 1 else ():
            axes.setdefault(kind, []).append(axis)
    most = {kind: max(getattr(plan, axis) for axis in own) for kind, own in axes.items()}
    return {kind: tuple(axis for axis in own if getattr(plan, axis) == most[kind]) for kind, own in axes.items()}


def measure_layout_calls(plan: Plan, groups: Mapping[str, ProcessGroup], device: torch.device) -> Seconds:
    """Time each kind of call of the plan at each of MESSAGE_BYTES; every rank calls this at the same time.

    Returns:
        Seconds by kind, as a mean over axes and ranks: the same on each rank.
    """
    found = {
        kind: [
            [_time(_call(kind, size, groups[axis], device), size, device) for size in MESSAGE_BYTES] for axis in axes
        ]
        for kind, axes in calls_of(plan).items()
    }
    if not found:
        return {}
    means = torch.tensor(
        np.array([np.mean(rows, axis=0) for rows in found.values()]), dtype=torch.float64, device=device
    )
    dist.all_reduce(means)
    rows = (means / dist.get_world_size()).tolist()
    return {kind: tuple(row) for kind, row in zip(found, rows, strict=True)}


def median_layout_calls(rounds: Sequence[Seconds]) -> Seconds:
    """Combine what was measured one after the other."""
    return {
        kind: tuple(float(value) for value in np.median([each[kind] for each in rounds], axis=0)) for kind in rounds[0]
    }


def layout_links(measured: Seconds, plan: Plan) -> dict[str, Link]:
    """Fit a line to each kind's times."""
    axes, source = calls_of(plan), "fitted to timed calls"
    return {
        kind: fit_steps(
            MESSAGE_BYTES, seconds, steps_of(kind, getattr(plan, axes[kind][0])), name=f"{kind} line", source=source
        )
        for kind, seconds in measured.items()
    }


def steps_of(kind: str, num_ranks: int) -> Steps:
    """Return what a call is made of; bytes are those of the whole tensor, of an all-to-all those that a rank has."""
    if kind == "send":
        return Steps(1, 1.0)
    return all_reduce_steps(num_ranks) if kind == "all_reduce" else reduce_scatter_steps(num_ranks)


def _call(kind: str, num_bytes: int, group: ProcessGroup, device: torch.device) -> Callable[[], object]:
    """Return a call of the kind that a technique makes, with nothing computed beside."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = torch.zeros(num_ranks, max(1, num_bytes // 4 // num_ranks), device=device)  # [t, S/t x H]
    sequence = rows.view(1, -1, 1)  # [1, S, 1]
    whole, arrives = rows.view(-1), torch.empty_like(rows.view(-1))

    def send() -> None:
        start(Receive(arrives, (rank - 1) % num_ranks), Send(whole, (rank + 1) % num_ranks), group=group).wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: Sum(whole, group).finish(),
        "all_gather": lambda: SequenceGather(rows[rank].view(1, -1, 1), group).finish(),
        "reduce_scatter": lambda: SequenceScatterSum(sequence, group).finish(),
        "all_to_all": lambda: trade(rows, group),
        "send": send,
    }
    return calls[kind]


@torch.no_grad()
def _time(call: Callable[[], object], num_bytes: int, device: torch.device) -> float:
    """Return the seconds of one call of several that follow one another; the first warms up."""
    repeats = max(FEW, min(MANY, ENOUGH_BYTES // num_bytes))
    call()
    dist.barrier()
    begin = now(device)
    for _ in range(repeats):
        call()
    return (now(device) - begin) / repeats
