"""Time what a call of sharding costs a rank that computes, beyond what it costs a rank that only waits for it.

In a step the threads that move messages want the cores on which ranks compute, hooks run between layers, and a gather
is done when the slower rank is. On two cores that comes to a millisecond a call, more than the call itself. It is read
off two small transformers, other ones than the model to be predicted: each is trained whole and sharded, and the
difference, less what the simulator makes of it from the calls timed alone, is shared among the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from distlab.measure.count.module import workload_from_module
from distlab.measure.machine.once import on_first_rank
from distlab.measure.machine.speed import REFERENCES, Reference, Round, fit_cluster, now
from distlab.measure.runs.calls import CallTimes, links_of, without_accumulation
from distlab.measure.runs.programs import Program, sharded_program
from distlab.plan import Plan, Sharding, Workload
from simulator import Measured, Step, simulate

BUCKET_BYTES, FIRST_BUCKET_BYTES = 200_000, 50_000  # several buckets in each reference
REPEATS = 4

Loss = Callable[[Callable[..., Any]], torch.Tensor]  # of a model, or of what stands in for it
Phases = tuple[float, float, float]  # seconds of forward, of backward until gradients are there, of the update


@dataclass(frozen=True)
class _Pair:
    """A reference model twice: whole on each rank, and sharded over them."""

    whole: Callable[[], Phases]
    sharded: Callable[[], Phases]


class BusyRanks:
    """The reference models, made once and timed in each round.

    Every rank of the group makes one and calls `measure` at the same time.
    """

    def __init__(self, sharding: Sharding, device: torch.device) -> None:
        self.sharding, self.device = sharding, device
        self.pairs = [_make_pair(reference, sharding, device) for reference in REFERENCES[1:3]]
        self.workloads = on_first_rank(
            lambda: [without_accumulation(count_reference(reference, device)) for reference in REFERENCES[1:3]]
        )

    def measure(self, measured: Round, calls: CallTimes) -> CallTimes:
        """Return the calls with what a gather and a scatter cost a computing rank beyond their parts."""
        num_ranks = dist.get_world_size()
        totals = np.zeros((2, 2))  # gathers, scatters: seconds and how many
        for pair, workload in zip(self.pairs, self.workloads, strict=True):
            more = np.subtract(_median(pair.sharded), _median(pair.whole))
            extra = mean_over_ranks(more, self.device)
            plan = Plan(
                data=num_ranks, sharding=self.sharding, bucket_bytes=BUCKET_BYTES, first_bucket_bytes=FIRST_BUCKET_BYTES
            )
            cluster = fit_cluster(measured, num_ranks)
            step = simulate(workload, cluster, plan, measured=Measured(links=links_of(calls, num_ranks)))
            alone = simulate(workload, cluster, Plan())
            totals += shared_out(extra - np.subtract(phases(step), phases(alone)), step)
        seconds = totals[:, 0] / np.maximum(totals[:, 1], 1)
        gather, scatter = (max(0.0, float(value)) for value in seconds)
        return replace(calls, beside=(gather, scatter))


def build_reference(reference: Reference, device: torch.device) -> tuple[nn.Module, Loss]:
    """Return a reference model, and what calls it (or what stands in for it) on fixed tokens and returns the loss."""
    model, _, _ = reference.build(device)
    tokens = torch.randint(256, (reference.samples, reference.context), device=device)
    return model, lambda caller: model.loss(caller(tokens), tokens)


def no_change(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer that works as training's does and hardly moves a weight."""
    return torch.optim.SGD(parameters, lr=1e-6, momentum=0.9)


def count_reference(reference: Reference, device: torch.device) -> Workload:
    """Count a step of a reference model in this process."""
    model, loss = build_reference(reference, device)
    optimizer = no_change(list(model.parameters()))
    return workload_from_module(model, lambda: loss(model), optimizer=optimizer, samples=reference.samples)


def _make_pair(reference: Reference, sharding: Sharding, device: torch.device) -> _Pair:
    whole, whole_loss = build_reference(reference, device)
    update = no_change(list(whole.parameters()))
    sharded, sharded_loss = build_reference(reference, device)
    program = sharded_program(sharded, sharding, no_change, bucket_bytes=BUCKET_BYTES)
    return _Pair(
        lambda: _time_whole(whole, whole_loss, update, device),
        lambda: time_program(program, sharded_loss, device),
    )


def _time_whole(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> Phases:
    """Run a step of the whole model on each rank for itself; gradients are made anew, as shards take them."""
    optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    start = now(device)
    value = loss(model)
    forward = now(device)
    value.backward()
    backward = now(device)
    optimizer.step()
    return forward - start, backward - forward, now(device) - backward


def time_program(program: Program, loss: Loss, device: torch.device) -> Phases:
    """Run a step of a program on all ranks together."""
    program.zero_grad()
    dist.barrier()
    start = now(device)
    value = loss(program.model)
    forward = now(device)
    value.backward()
    program.synchronize()
    backward = now(device)
    program.update()
    return forward - start, backward - forward, now(device) - backward


def _median(timed: Callable[[], Phases]) -> Sequence[float]:
    """Return the middle of several steps, the first of which warms up."""
    rows = [timed() for _ in range(REPEATS + 1)][1:]
    return [float(value) for value in np.median(rows, axis=0)]


def phases(step: Step) -> Phases:
    """Return the same three parts of a simulated step, in seconds."""
    forward = float(step.timing.end_ns[0]) / 1e9
    update = step.timing.optimizer[0][0] / 1e9
    return forward, update - forward, step.duration_s - update


def shared_out(left: np.ndarray, step: Step) -> np.ndarray:
    """Return the seconds that are left for gathers and for scatters, and how many of each there are.

    Stage 3 gathers in forward, and again in backward beside its scatters; stages 1 and 2 gather after the update.
    """
    forward, backward, update = left
    if step.plan.sharding.stage < 3:
        count = len(step.stages[0].buckets)
        return np.array([[update, count], [backward, count]])
    units = len(step.stages[0].units)
    again = sum(call.lane == "gather" for call in step.timing.calls[0]) - units
    return np.array([[forward, units], [backward - forward / units * again, units]])


def mean_over_ranks(values: Sequence[float] | np.ndarray, device: torch.device) -> np.ndarray:
    """Return each value's mean over all ranks."""
    total = torch.tensor(np.asarray(values), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).cpu().numpy()
