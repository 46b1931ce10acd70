"""Calibrate for a plan, and predict a step of it.

A round measures three kinds of numbers, which the simulator gets: how fast ranks compute, what each of the plan's calls
and its codec cost alone, and the overhead of steps. The overhead is what steps cost beyond their work and their calls.
In a step the threads that move messages compete with the ranks for the cores, and hooks run between layers. A call ends
when the slower rank does. A bucket to encode has left the cache. We measure this on two small transformers that are not
the model to be predicted, trained by the same plan. Their steps take longer than the simulator says.

The references of a mesh differ in the rows that a block hands on, since a part of its cost grows with them: they are
cut, copied and put together again on the way to a call. Those of replicas differ in the bytes of gradients: in shared
memory the computing rank copies them, which takes longer while others use the memory.

Where there are more ranks than cores, ranks take turns at computing: one that waits gives its core to the others, so a
pipeline's bubbles are filled with the other ranks' work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.blocks.models import GPTConfig
from distlab.comm.device import span_writer
from distlab.hybrid import Hybrid
from distlab.measure.count import gpt as gpt_count
from distlab.measure.machine.fit import fit_line, median_of
from distlab.measure.machine.ranks import on_first_rank, shared_cores
from distlab.measure.machine.speed import Reference, Round, fit_cluster, measure_round
from distlab.measure.runs import calls as plan_calls
from distlab.measure.runs.windows import time_window
from distlab.plan import AXES, Cluster, Contention, Layer, Plan, Work, Workload
from simulator import Measured, MeasuredCodec, Step, simulate

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


def count_model(
    config: GPTConfig, samples: int, plan: Plan, *, num_experts: int = 0, top_k: int = 2, device: torch.device
) -> Workload:
    """Count a micro-batch of the whole model in this process, as the plan's ranks run it: stages are layers.

    Raises:
        ValueError: a pipeline of layers with experts.
    """
    whole = gpt_count.count_gpt(config, samples, num_experts=num_experts, top_k=top_k, device=device)
    if plan_calls.is_data_parallel_alone(plan) and plan.sharding.stage and not num_experts:
        return gpt_count.without_accumulation(whole)
    return gpt_count.merge_stages(whole, plan.pipeline * plan.stages_per_rank)


class ByteCost(NamedTuple):
    """What a pass of a block costs in a reference model beyond what was timed alone.

    Attributes:
        num_bytes: of the block, with which the cost grows; see `bytes_of`.
        seconds: of each; where gradients are compressed, for each second that the codec takes alone.
    """

    num_bytes: float
    seconds: float


@dataclass(frozen=True)
class Overhead:
    """What a step costs beyond its work and its calls, each of which is timed alone: one cost for each reference.

    Passes of blocks enter autograd functions, copy on the way to a call, choose an action, and wait for the slower
    rank. Those of replicas that hold whole blocks wait in backward alone, which their calls slow down. Where gradients
    are compressed, encoding and decoding in a step take longer.
    """

    costs: tuple[ByteCost, ...] = ()

    @property
    def codec_slowdown(self) -> float:
        """How many times slower encoding and decoding are in a step: a mean by bytes of gradients."""
        more = sum(cost.num_bytes * max(0.0, cost.seconds) for cost in self.costs)
        return 1 + more / (sum(cost.num_bytes for cost in self.costs) or 1.0)


@dataclass(frozen=True)
class CalibrationRound:
    """What the ranks measured in a round: the same values on every rank.

    Attributes:
        compute: how fast ranks compute, all of them at once.
        calls: seconds of each kind of call that the plan makes, timed alone.
        codec: encoding and decoding, timed alone, where the plan compresses gradients.
        overhead: what steps cost beyond these.
    """

    compute: Round
    calls: plan_calls.Calls = field(default_factory=dict)
    codec: MeasuredCodec | None = None
    overhead: Overhead = Overhead()


def median_calibration(rounds: Sequence[CalibrationRound]) -> CalibrationRound:
    """Combine rounds taken one after the other into one."""
    return cast(CalibrationRound, median_of(rounds))


def between_windows(rounds: Sequence[CalibrationRound], whole: CalibrationRound) -> CalibrationRound:
    """Combine the rounds near a window, with what the median of all rounds, `whole`, knows better.

    How much computing and communicating slow each other down, and all overhead, are small differences of large times:
    hard to measure, and slow to drift. These are taken from all rounds.
    """
    near = median_calibration(rounds)
    compute = replace(near.compute, contention=whole.compute.contention)
    return replace(near, compute=compute, overhead=whole.overhead)


def predict_step(
    workload: Workload, measured: CalibrationRound, plan: Plan, *, order: Sequence[str] = AXES, cores: int | None = None
) -> Step:
    """Simulate a step of a whole model (see `count_gpt`) on this machine, as a calibration round saw it.

    Each kind of call takes the line that was fitted to its times, on whatever axis it is made.

    Args:
        workload: a micro-batch of one replica.
        measured: the calibration.
        plan: what the ranks run.
        order: axes of the mesh, slowest first.
        cores: shared by the ranks: those that wait in a pipeline lend theirs to the others. None: one core for each.
    """
    overhead, links = measured.overhead, plan_calls.links_of(measured.calls)
    cluster = replace(fit_cluster(measured.compute, plan.world_size), num_cores=cores)
    # Of a pipeline alone only messages travel; how they and computing slow each other down is in the overhead.
    if plan_calls.is_pipeline_alone(plan):
        cluster = replace(cluster, contention=Contention())
    codec = measured.codec and measured.codec.slower(overhead.codec_slowdown)
    costed = workload if codec else _with_overhead(workload, overhead, cluster, plan)
    return simulate(costed, cluster, plan, order=order, measured=Measured(codec, links))


def num_blocks(layer: Layer) -> int:
    """Count a layer's blocks: a stage that is one layer has several."""
    return sum(region.attention is not None for region in layer.regions)


def bytes_of(layer: Layer, plan: Plan) -> float:
    """Return the bytes with which the cost of a layer's blocks grows: what they hand on, or replicas' gradients."""
    if plan_calls.is_data_parallel_alone(plan):
        return 4.0 * sum(layer.parameter_sizes) if num_blocks(layer) else 0.0
    return float(sum(region.input_bytes for region in layer.regions if region.attention is not None))


def _with_overhead(workload: Workload, overhead: Overhead, cluster: Cluster, plan: Plan) -> Workload:
    """Add the overhead to the passes of each layer's blocks.

    The simulator divides work outside of regions by positions, so the cost is multiplied by their parts first.
    """
    fixed_s, s_per_byte = fit_line(*zip(*overhead.costs, strict=True)) if overhead.costs else (0.0, 0.0)
    parts = plan.context * (plan.tensor if plan.sequence_parallel else 1)
    waits_for_nobody = plan_calls.is_data_parallel_alone(plan) and plan.sharding.stage < 3

    def costed(layer: Layer) -> Layer:
        seconds = num_blocks(layer) * fixed_s + bytes_of(layer, plan) * s_per_byte
        more = Work(cluster.device.matmul_flops_per_s * seconds * parts)
        forward = layer.forward if waits_for_nobody else layer.forward + more
        return replace(layer, forward=forward, input_gradient=layer.input_gradient + more)

    return replace(workload, layers=tuple(costed(layer) for layer in workload.layers))


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
        references = REPLICA_REFERENCES if plan_calls.is_data_parallel_alone(plan) else MESH_REFERENCES
        parts = plan.num_microbatches * plan.num_replicas
        sizes = [  # none for a rank that trains alone: it has no overhead
            (reference_sizes(each, plan, num_layers), -(-each.samples // parts))
            for each in (references if plan.world_size > 1 else ())
        ]
        for config, samples in sizes:
            model = gpt_count.make_gpt(config, 0, **experts).to(device)
            spans = span_writer(dist.get_rank(), device)
            hybrid = Hybrid(model, plan, partial(sgd, learning_rate=1e-6), order=order, spans=spans)
            shape, generator = (samples * parts, config.context), torch.Generator().manual_seed(0)
            tokens = torch.randint(config.vocab_size, shape, generator=generator).to(device)
            self._trained.append((hybrid, tokens))
        self._workloads = on_first_rank(
            lambda: [count_model(config, samples, plan, device=device, **experts) for config, samples in sizes]
        )

    def measure(self) -> CalibrationRound:
        """Take one round of measurements: the same result on every rank."""
        plan, device = self.plan, self.device
        compute, codec = measure_round(device, works=self._works), None
        if plan.compression is not None:
            codec = plan_calls.measure_codec(plan.compression, fit_cluster(compute, plan.world_size), device=device)
        kinds = plan_calls.kinds_of_calls(plan).items()
        calls = {kind: plan_calls.times_of(kind, list(map(self.groups.get, axes)), device) for kind, axes in kinds}
        measured = CalibrationRound(compute, calls, codec)
        return replace(measured, overhead=self._overhead(measured))

    def close(self) -> None:
        """Take the reference models off their ranks."""
        for hybrid, _ in self._trained:
            hybrid.close()

    def _overhead(self, measured: CalibrationRound) -> Overhead:
        seconds, loads = [], []
        for hybrid, tokens in self._trained:
            step = partial(hybrid.train_step, tokens, tokens)
            times = [time_window(step, 1, self.device)[0] for _ in range(REPEATS + 1)]
            seconds.append(median(times[1:]))  # the first warms up
            loads.append(gpt_count.expert_loads(hybrid.stages.values(), self.plan, self.device))

        def solved() -> Overhead:
            costs, cores = [], shared_cores(self.device)
            for counted, step_s, load in zip(self._workloads, seconds, loads, strict=True):
                loaded = gpt_count.with_expert_loads(counted, load, self.plan, cores=cores)
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


def reference_sizes(reference: Reference, plan: Plan, num_layers: int = MANY_LAYERS) -> GPTConfig:
    """Return a model about as large as the reference that the plan can split, for a model of so many layers."""

    def multiple(least: int, divisor: int) -> int:
        return -(-least // divisor) * divisor

    num_heads = multiple(4, plan.tensor * plan.context)
    positions = plan.context * plan.tensor * (2 if plan.context > 1 else 1)
    num_stages = plan.pipeline * plan.stages_per_rank
    return GPTConfig(
        num_layers=num_stages * min(4, -(-num_layers // num_stages)),
        num_heads=num_heads,
        hidden_size=multiple(reference.hidden_size, num_heads),
        context=multiple(reference.context, positions),
        tied=False,
    )
