"""Calibrate for a plan: a round measures the machine's speed, the plan's calls and codec, and the overhead of steps.

The overhead is what steps cost beyond their work and their calls, each of which is timed alone. In a step the threads
that move messages compete with the ranks for the cores, and hooks run between layers. A call ends when the slower rank
does. A bucket to encode has left the cache. We measure this on two small transformers that are not the model to be
predicted, trained by the same plan. Their steps take longer than the simulator says.
The references of a mesh differ in the rows that a block hands on, since a part of its cost grows with them: they are
cut, copied and put together again on the way to a call. Those of replicas differ in the bytes of gradients: in shared
memory the computing rank copies them, which takes longer while others use the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.blocks.models import GPTConfig
from distlab.comm.device import span_writer
from distlab.hybrid import Hybrid
from distlab.measure.count.gpt import expert_loads, make_gpt, with_expert_loads
from distlab.measure.machine.ranks import on_first_rank, shared_cores
from distlab.measure.machine.speed import Reference, fit_cluster, measure_round
from distlab.measure.runs.calls import is_data_parallel_alone, measure_calls, measure_codec
from distlab.measure.runs.predict import (
    ByteCost,
    CalibrationRound,
    Overhead,
    bytes_of,
    count_model,
    num_blocks,
    predict_step,
)
from distlab.measure.runs.windows import time_window
from distlab.plan import Plan, Work, Workload

# Layers of a reference: as many per stage as the model to be predicted has, four at most: what a step costs, however
# many blocks it has, is counted with its blocks. Samples are those of all micro-batches and replicas.
MESH_REFERENCES = (Reference(64, 0, 48, 2), Reference(96, 0, 96, 10))
REPLICA_REFERENCES = (Reference(64, 0, 96, 4), Reference(160, 0, 48, 8))  # units of 0.2 and 1.2 MB: most are between
MANY_LAYERS = 1 << 30  # of a model of which nothing else is known
REPEATS = 4
GUESSES = 6
EXACT = 1e-4  # of a step: as close as a guess has to come
LEARNING_RATE = 0.03
MOMENTUM = 0.9


def sgd(parameters: list[nn.Parameter], learning_rate: float = LEARNING_RATE) -> torch.optim.Optimizer:
    """Make the optimizer of every timed training."""
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=MOMENTUM)


class CalibrationOfRun:
    """What a run's rounds measure. Every rank makes one, and calls the methods at the same time as the others.

    Args:
        plan: of the run to be predicted.
        order: of its axes, slowest first.
        groups: the ranks along each axis of its mesh; an axis that is left out has all ranks.
        device: where this rank computes.
        num_layers: blocks of the model to be predicted.
        num_experts: experts of a block; 0 for none.
        top_k: experts of a token.
    """

    def __init__(
        self,
        plan: Plan,
        order: Sequence[str],
        groups: Mapping[str, ProcessGroup],
        *,
        device: torch.device,
        num_layers: int = MANY_LAYERS,
        num_experts: int = 0,
        top_k: int = 2,
    ) -> None:
        self.plan, self.order, self.groups, self.device = plan, tuple(order), groups, device
        self._works: dict[str, Work] = {}
        self._trained: list[tuple[Hybrid, torch.Tensor]] = []
        experts = {"num_experts": num_experts, "top_k": top_k}
        sizes = [
            (reference_sizes(each, plan, num_layers), reference_samples(each, plan)) for each in references_of(plan)
        ]
        for config, samples in sizes:
            model = make_gpt(config, 0, **experts).to(device)
            spans = span_writer(dist.get_rank(), device)
            hybrid = Hybrid(model, plan, partial(sgd, learning_rate=1e-6), order=order, spans=spans)
            shape = (samples * plan.num_microbatches * plan.num_replicas, config.context)
            tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
            self._trained.append((hybrid, tokens))
        self._workloads = on_first_rank(
            lambda: [count_model(config, samples, plan, device=device, **experts) for config, samples in sizes]
        )

    def measure(self) -> CalibrationRound:
        """Take one round of measurements: the same result on every rank."""
        plan, device = self.plan, self.device
        compute, codec = measure_round(device, works=self._works), None
        if plan.compression is not None:
            codec = measure_codec(plan.compression, fit_cluster(compute, plan.world_size), device=device)
        measured = CalibrationRound(compute, measure_calls(plan, self.groups, device), codec)
        return replace(measured, overhead=self._overhead(measured))

    def close(self) -> None:
        """Take the reference models off their ranks."""
        for hybrid, _ in self._trained:
            hybrid.close()

    def _overhead(self, measured: CalibrationRound) -> Overhead:
        """Return what the references' steps cost beyond what a round without overhead explains."""
        seconds, loads = [], []
        for hybrid, tokens in self._trained:
            step = partial(hybrid.train_step, tokens, tokens)
            times = [time_window(step, 1, self.device)[0] for _ in range(REPEATS + 1)]
            seconds.append(median(times[1:]))  # the first warms up
            loads.append(expert_loads(hybrid.stages.values(), self.plan, self.device))

        def solved() -> Overhead:
            costs, cores = [], shared_cores(self.device)
            for counted, step_s, load in zip(self._workloads, seconds, loads, strict=True):
                loaded = with_expert_loads(counted, load, self.plan, cores=cores)
                costs.append(solve_cost(loaded, step_s, measured, self.plan, order=self.order, cores=cores))
            return Overhead(tuple(costs))

        return on_first_rank(solved)


def solve_cost(
    workload: Workload,
    seconds: float,
    measured: CalibrationRound,
    plan: Plan,
    *,
    order: Sequence[str],
    cores: int | None,
) -> ByteCost:
    """Find the cost that makes the simulated step as long as the measured one, by the secant method.

    Noise can make the measured step shorter than its work alone. Then the cost is below zero; the median over rounds
    evens that out.
    """
    num_bytes = next(bytes_of(layer, plan) / num_blocks(layer) for layer in workload.layers if num_blocks(layer))

    def predicted_s(cost_s: float) -> float:
        costly = replace(measured, overhead=Overhead((ByteCost(num_bytes, cost_s),)))
        return predict_step(workload, costly, plan, order=order, cores=cores).duration_s

    low, low_s = 0.0, predicted_s(0.0)
    high = abs(seconds - low_s)  # if all of it were paid once
    for _ in range(GUESSES):
        high_s = predicted_s(high)
        if high_s == low_s:  # nothing of the step costs more
            return ByteCost(num_bytes, low)
        guess = low + (seconds - low_s) * (high - low) / (high_s - low_s)
        low, low_s, high = high, high_s, guess
        if guess < 0 or abs(high_s - seconds) < EXACT * seconds:
            break
    return ByteCost(num_bytes, high)


def references_of(plan: Plan) -> Sequence[Reference]:
    """Return the models whose steps tell a plan's overhead; none for a rank that trains alone, which has none."""
    if plan.world_size == 1:
        return ()
    return REPLICA_REFERENCES if is_data_parallel_alone(plan) else MESH_REFERENCES


def reference_sizes(reference: Reference, plan: Plan, num_layers: int = MANY_LAYERS) -> GPTConfig:
    """Return a model about as large as the reference that the plan can split, for a model of so many layers."""
    num_heads = _multiple(4, plan.tensor * plan.context)
    positions = plan.context * plan.tensor * (2 if plan.context > 1 else 1)
    num_stages = plan.pipeline * plan.stages_per_rank
    return GPTConfig(
        num_layers=num_stages * min(4, -(-num_layers // num_stages)),
        num_heads=num_heads,
        hidden_size=_multiple(reference.hidden_size, num_heads),
        context=_multiple(reference.context, positions),
        tied=False,
    )


def reference_samples(reference: Reference, plan: Plan) -> int:
    """Return the samples of a micro-batch of a replica, one at least."""
    return -(-reference.samples // (plan.num_microbatches * plan.num_replicas))


def _multiple(least: int, divisor: int) -> int:
    """Return the smallest multiple of divisor that is at least so large."""
    return -(-least // divisor) * divisor
