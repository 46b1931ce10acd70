"""Predict a step of any plan: one count of the whole model, what a calibration round measured, and the simulator.

The simulator gets three kinds of measured numbers: how fast ranks compute, what each kind of call costs alone, and the
overhead: what a step costs beyond both, read off steps of other models (`calibrate`).

Where there are more ranks than cores, ranks take turns at computing: one that waits gives its core to the others, so a
pipeline's bubbles are filled with the other ranks' work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch

from distlab.blocks.models import GPTConfig
from distlab.measure.count.gpt import count_gpt, merge_stages, without_accumulation
from distlab.measure.machine.fit import fit_line, median_of
from distlab.measure.machine.speed import Round, fit_cluster
from distlab.measure.runs.calls import Calls, is_data_parallel_alone, is_pipeline_alone, links_of
from distlab.plan import AXES, Cluster, Contention, Layer, Plan, Work, Workload
from simulator import Measured, MeasuredCodec, Step, simulate


def count_model(
    config: GPTConfig, samples: int, plan: Plan, *, num_experts: int = 0, top_k: int = 2, device: torch.device
) -> Workload:
    """Count a micro-batch of the whole model in this process, as the plan's ranks run it: stages are layers.

    Raises:
        ValueError: a pipeline of layers with experts.
    """
    whole = count_gpt(config, samples, num_experts=num_experts, top_k=top_k, device=device)
    if is_data_parallel_alone(plan) and plan.sharding.stage and not num_experts:
        return without_accumulation(whole)
    return merge_stages(whole, plan.pipeline * plan.stages_per_rank)


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
    calls: Calls = field(default_factory=dict)
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
    workload: Workload,
    measured: CalibrationRound,
    plan: Plan,
    *,
    order: Sequence[str] = AXES,
    cores: int | None = None,
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
    overhead, links = measured.overhead, links_of(measured.calls)
    cluster = replace(fit_cluster(measured.compute, plan.world_size), num_cores=cores)
    if is_pipeline_alone(plan):  # only messages travel; how they and computing slow each other down is in the overhead
        cluster = replace(cluster, contention=Contention())
    if measured.codec is not None:
        codec = measured.codec.slower(overhead.codec_slowdown)
        return simulate(workload, cluster, plan, order=order, measured=Measured(codec, links))
    costed = _with_overhead(workload, overhead, cluster, plan)
    return simulate(costed, cluster, plan, order=order, measured=Measured(None, links))


def num_blocks(layer: Layer) -> int:
    """Count a layer's blocks: a stage that is one layer has several."""
    return sum(region.attention is not None for region in layer.regions)


def bytes_of(layer: Layer, plan: Plan) -> float:
    """Return the bytes with which the cost of a layer's blocks grows: what they hand on, or replicas' gradients."""
    if is_data_parallel_alone(plan):
        return 4.0 * sum(layer.parameter_sizes) if num_blocks(layer) else 0.0
    return float(sum(region.input_bytes for region in layer.regions if region.attention is not None))


def fit_bytes(costs: Sequence[ByteCost]) -> tuple[float, float]:
    """Fit seconds = fixed + bytes x rate with the least squares, neither negative; 0 for no cost."""
    return fit_line(*zip(*costs, strict=True)) if costs else (0.0, 0.0)


def _with_overhead(workload: Workload, overhead: Overhead, cluster: Cluster, plan: Plan) -> Workload:
    """Add the overhead to the passes of each layer's blocks.

    The simulator divides work outside of regions by positions, so the cost is multiplied by their parts first.
    """
    fixed_s, s_per_byte = fit_bytes(overhead.costs)
    parts = plan.context * (plan.tensor if plan.sequence_parallel else 1)
    waits_for_nobody = is_data_parallel_alone(plan) and plan.sharding.stage < 3

    def costed(layer: Layer) -> Layer:
        seconds = num_blocks(layer) * fixed_s + bytes_of(layer, plan) * s_per_byte
        more = Work(cluster.device.matmul_flops_per_s * seconds * parts)
        forward = layer.forward if waits_for_nobody else layer.forward + more
        return replace(layer, forward=forward, input_gradient=layer.input_gradient + more)

    return replace(workload, layers=tuple(costed(layer) for layer in workload.layers))
