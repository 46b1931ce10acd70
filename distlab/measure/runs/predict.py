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

import numpy as np
import torch

from distlab.blocks.models import GPTConfig
from distlab.measure.count.gpt import count_gpt, merge_stages, without_accumulation
from distlab.measure.machine.fit import fit_line, median_of
from distlab.measure.machine.speed import Round, fit_cluster
from distlab.measure.runs.calls import Calls, is_data_parallel_alone, is_pipeline_alone, links_of
from distlab.plan import AXES, SCHEDULES, Cluster, Contention, Layer, Plan, Work, Workload
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
    """What a part of a step costs in a reference model beyond what was timed alone; `costs_more` says which part.

    Attributes:
        num_bytes: what the cost grows with; see `bytes_of`.
        seconds: of each; of a codec, for each second that it takes alone.
    """

    num_bytes: float
    seconds: float


def costs_more(plan: Plan) -> str:
    """Say what of a plan's steps costs more than it does alone, each time.

    - "actions" of a pipeline: choosing one, posting and receiving messages, entering autograd.
    - "codec": encoding and decoding.
    - "passes" of blocks on any other mesh, forward and backward: entering autograd functions, copies on the way to a
      call, waiting for the slower rank; of replicas that hold whole blocks backward alone, which their calls slow down.
    """
    if is_pipeline_alone(plan):
        return "actions"
    return "codec" if is_data_parallel_alone(plan) and plan.compression is not None else "passes"


@dataclass(frozen=True)
class Overhead:
    """What a step costs beyond its work and its calls, each of which is timed alone: one cost for each reference."""

    costs: tuple[ByteCost, ...] = ()

    @property
    def action_s(self) -> float:
        """What an action of a pipeline costs."""
        return float(np.mean([max(0.0, cost.seconds) for cost in self.costs] or 0.0))

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
    more, overhead, links = costs_more(plan), measured.overhead, links_of(measured.calls)
    cluster = replace(fit_cluster(measured.compute, plan.world_size), num_cores=cores)
    if more == "actions":
        # All that travels is messages, and how they and computing slow each other down is in the cost of an action.
        link = links.pop("send")
        cluster = replace(cluster, intra_node=link, inter_node=link, contention=Contention())
    codec = None if measured.codec is None else measured.codec.slower(overhead.codec_slowdown)
    costed = _with_overhead(workload, overhead, cluster, plan)
    return simulate(costed, cluster, plan, order=order, measured=Measured(codec, links))


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
    """Add the overhead of passes and actions to each layer's work; where W is its own action, W gets one, too.

    The simulator divides work outside of regions by positions, so the cost is multiplied by their parts first.
    """
    fixed_s, s_per_byte = fit_bytes(overhead.costs if costs_more(plan) == "passes" else ())
    parts = plan.context * (plan.tensor if plan.sequence_parallel else 1)
    rate = cluster.device.matmul_flops_per_s
    waits_for_nobody = is_data_parallel_alone(plan) and plan.sharding.stage < 3
    action = Work(rate * overhead.action_s) if costs_more(plan) == "actions" else Work()

    def costed(layer: Layer) -> Layer:
        seconds = num_blocks(layer) * fixed_s + bytes_of(layer, plan) * s_per_byte
        more = action + Work(rate * seconds * parts)
        own = action if SCHEDULES[plan.schedule].splits_backward else Work()
        return replace(
            layer,
            forward=layer.forward if waits_for_nobody else layer.forward + more,
            input_gradient=layer.input_gradient + more,
            weight_gradient=layer.weight_gradient + own,
        )

    return replace(workload, layers=tuple(costed(layer) for layer in workload.layers))
