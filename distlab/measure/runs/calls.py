"""Time the calls that a plan's steps make, as the techniques make them, so that these steps can be predicted.

Each kind of call gets a line of its own, fitted to its times, since on one machine kinds of call differ by more than
the theory of rings says. Which calls are timed follows from the plan:

- Sharded states without other axes (`measure_sharding_calls`): the gather and the scatter, each in parts, since a step
  pays for the parts on different lanes. Starting a call keeps the computing rank busy; then the call travels while the
  rank computes; and the computing rank adds up what arrived of a scatter.
- A pipeline without other axes (`measure_messages`): a message to the next rank.
- Any other mesh (`measure_mesh_calls`): each kind of call on the groups of its axis, all groups at once. On 2 x 2 ranks
  two tensor groups sum at the same time, and share the wires.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.collectives import DirectGather, DirectScatter
from distlab.comm.p2p import Receive, Send, needs_batches, start
from distlab.context_parallel.all_to_all import trade
from distlab.measure.machine import speed
from distlab.measure.machine.ranks import largest_over_ranks, mean_over_ranks, now
from distlab.plan import Link, Plan
from distlab.shared_memory.group import zeros
from distlab.tensor_parallel.async_calls import SequenceGather, SequenceScatterSum, Sum
from simulator import fit_steps
from simulator.hardware.cost import Steps, all_reduce_steps, reduce_scatter_steps

MESSAGE_BYTES = (4_096, 32_768, 131_072, 524_288, 2_097_152)
ENOUGH_BYTES = 8_000_000  # a call is repeated until it sent so much, within limits
FEW, MANY = 3, 24
ROUND_TRIPS = 11
LEAST_S = 1e-9  # a part that takes no time needs a line too


class CallTimes(NamedTuple):
    """Seconds of one kind of call, or of a part of it; the same on every rank.

    Attributes:
        steps: what the call is made of, for the fit.
        num_bytes: sizes that were timed: of the whole tensor; of an all-to-all, what one rank has.
        seconds: of a call of each size.
    """

    steps: Steps
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]


Calls = Mapping[str, CallTimes]  # by kind of call, under the names that `simulate` takes


def links_of(calls: Calls) -> dict[str, Link]:
    """Fit a line to each kind's times."""
    return {
        kind: fit_steps(
            times.num_bytes,
            [max(LEAST_S, each) for each in times.seconds],
            times.steps,
            name=kind,
            source="fitted to timed calls",
        )
        for kind, times in calls.items()
    }


def measure_sharding_calls(device: torch.device, *, stage: int) -> Calls:
    """Time the gather and the scatter of sharding in their parts; every rank calls this at the same time.

    In stage 3 shards and gradients lie in buffers that other ranks read, where the group has such.
    """
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    if num_ranks == 1:
        return {}
    rows = []
    for size in speed.MESSAGE_BYTES:
        each = max(1, size // 4 // num_ranks)
        if stage == 3:
            full, own = (zeros(n, dtype=torch.float32, device=device, group=None) for n in (each * num_ranks, each))
        else:
            full = torch.zeros(each * num_ranks, device=device)
            own = full.chunk(num_ranks)[rank]
        repeats = _repeats(size)
        gather = _mean_of_parts([_gather(full, own) for _ in range(repeats + 1)])
        scatter = _mean_of_parts([_scatter(full) for _ in range(repeats + 1)])
        rows += [gather[1], scatter[1], gather[0], scatter[0], scatter[2]]
    ring, once = reduce_scatter_steps(num_ranks), Steps(1, 1.0)
    parts = {
        "all_gather": ring,
        "reduce_scatter": ring,
        "all_gather start": once,
        "reduce_scatter start": once,
        "reduce_scatter sum": once,
    }
    means = mean_over_ranks(rows, device)
    return {
        name: CallTimes(steps, speed.MESSAGE_BYTES, tuple(means[part :: len(parts)]))
        for part, (name, steps) in enumerate(parts.items())
    }


def _gather(full: Tensor, own: Tensor) -> tuple[float, ...]:
    """Make a gather; return the seconds of its start and of the rest."""
    begin = now(full.device)
    call = DirectGather(full, own, None)
    started = _time_when_free(full)
    call.finish()
    return started - begin, now(full.device) - started


@torch.no_grad()
def _scatter(full: Tensor) -> tuple[float, ...]:
    """Make a scatter; return the seconds of its start, until all parts are there, and of the sum."""
    begin = now(full.device)
    call = DirectScatter(full, None)
    started = _time_when_free(full)
    call.wait()
    arrived = now(full.device)
    call.finish()
    return started - begin, arrived - started, now(full.device) - arrived


def _time_when_free(full: Tensor) -> float:
    """Return when the rank that started a call may compute; with nccl that is at once, since the call is a kernel."""
    return time.perf_counter() if needs_batches(full, None) else now(full.device)


def _mean_of_parts(rows: Sequence[tuple[float, ...]]) -> list[float]:
    """Return the mean of each part without the first call, which warms up. Ranks go on together."""
    dist.barrier()
    return [float(value) for value in np.mean(rows[1:], axis=0)]


def measure_messages(device: torch.device) -> CallTimes:
    """Time a message from one rank to the next, as the pipeline sends it; every rank calls this at the same time.

    Each rank has posted its receive, and one message goes round all ranks.
    """
    if dist.get_world_size() == 1:
        return CallTimes(Steps(1, 1.0), MESSAGE_BYTES, (LEAST_S,) * len(MESSAGE_BYTES))
    seconds = largest_over_ranks([_time_message(size, device) for size in MESSAGE_BYTES], device)
    return CallTimes(Steps(1, 1.0), MESSAGE_BYTES, tuple(seconds))


def _time_message(num_bytes: int, device: torch.device) -> float:
    """Pass a message on from rank to rank, round and round; each rank's receive waits for it already."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sent, arrives = torch.zeros(num_bytes // 4, device=device), torch.empty(num_bytes // 4, device=device)
    times = []
    for _ in range(ROUND_TRIPS + 1):
        receive = start(Receive(arrives, (rank - 1) % num_ranks))
        dist.barrier()
        begin = now(device)
        if rank != 0:
            receive.wait()
        send = start(Send(sent, (rank + 1) % num_ranks))
        if rank == 0:
            receive.wait()
        times.append((now(device) - begin) / num_ranks)
        send.wait()
    return float(np.median(times[1:])) if rank == 0 else 0.0  # only rank 0 sees whole round trips


def kinds_of_calls(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Name the kinds of call that a step of the plan makes, and the axes on which to time each: those with most ranks.

    First come those inside passes, then messages between stages, then those for gradients: an all-reduce along data,
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


def measure_mesh_calls(plan: Plan, groups: Mapping[str, ProcessGroup], device: torch.device) -> Calls:
    """Time each kind of call of the plan, as a mean over axes and ranks; every rank calls this at the same time."""
    found = {}
    for kind, axes in kinds_of_calls(plan).items():
        rows = [
            [_time(_call(kind, size, groups[axis], device), size, device) for size in MESSAGE_BYTES] for axis in axes
        ]
        seconds = mean_over_ranks(np.mean(rows, axis=0).tolist(), device)
        found[kind] = CallTimes(steps_of(kind, getattr(plan, axes[0])), MESSAGE_BYTES, tuple(seconds))
    return found


def steps_of(kind: str, num_ranks: int) -> Steps:
    """Return what a call is made of."""
    if kind == "send":
        return Steps(1, 1.0)
    return all_reduce_steps(num_ranks) if kind == "all_reduce" else reduce_scatter_steps(num_ranks)


def _call(kind: str, num_bytes: int, group: ProcessGroup, device: torch.device) -> Callable[[], object]:
    """Return a call as a technique makes it, while the rank computes nothing."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = torch.zeros(num_ranks, max(1, num_bytes // 4 // num_ranks), device=device)  # [t, S/t x H]
    sequence = rows.view(1, -1, 1)  # [1, S, 1]
    whole, arrives = rows.view(-1), torch.empty_like(rows.view(-1))

    def send() -> None:
        start(Receive(arrives, (rank - 1) % num_ranks), Send(whole, (rank + 1) % num_ranks), group=group).wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: Sum(whole, group, waits=True).finish(),
        "all_gather": lambda: SequenceGather(rows[rank].view(1, -1, 1), group).finish(),
        "reduce_scatter": lambda: SequenceScatterSum(sequence, group).finish(),
        "all_to_all": lambda: trade(rows, group),
        "send": send,
    }
    return calls[kind]


@torch.no_grad()
def _time(call: Callable[[], object], num_bytes: int, device: torch.device) -> float:
    """Return the seconds of one call of several that follow one another; the first warms up."""
    repeats = _repeats(num_bytes)
    call()
    dist.barrier()
    begin = now(device)
    for _ in range(repeats):
        call()
    return (now(device) - begin) / repeats


def _repeats(num_bytes: int) -> int:
    return max(FEW, min(MANY, ENOUGH_BYTES // num_bytes))
