"""Predict a pipeline's step: count what each stage asks of a device, add what an action costs beside, and simulate.

A stage is one layer of the workload, so that the simulator cuts the model exactly where the ranks did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from distlab.measure.count.module import workload_from_module
from distlab.measure.machine.speed import Round, fit_cluster, median_round
from distlab.models import GPT, GPTConfig
from distlab.pipeline import split_gpt
from distlab.plan import SCHEDULES, Cluster, Contention, Layer, Plan, Schedule, Work, Workload, make_schedule
from simulator import Step, fit_steps, simulate
from simulator.hardware.cost import Steps

MESSAGE_BYTES = (4_096, 32_768, 131_072, 524_288, 2_097_152)


@dataclass(frozen=True)
class PipelineRound:
    """What the ranks observed in a round: the same values on every rank.

    Attributes:
        compute: how fast ranks compute, all of them at once.
        message_s: seconds of a message from one rank to the next, for each of MESSAGE_BYTES.
        action_s: seconds that an action costs beyond its layers' work: choosing it, posting and taking up messages,
            entering autograd anew for each stage and micro-batch.
    """

    compute: Round
    message_s: tuple[float, ...]
    action_s: float = 0.0


@dataclass(frozen=True)
class Layout:
    """A pipeline's schedule by its name and numbers."""

    schedule: str
    num_ranks: int
    num_microbatches: int
    stages_per_rank: int = 1

    def make(self) -> Schedule:
        """Return the schedule as data."""
        return make_schedule(self.schedule, self.num_ranks, self.num_microbatches, stages_per_rank=self.stages_per_rank)

    def plan(self) -> Plan:
        """Return the plan that the simulator takes."""
        return Plan(
            pipeline=self.num_ranks,
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            stages_per_rank=self.stages_per_rank,
        )


def median_pipeline_round(rounds: Sequence[PipelineRound]) -> PipelineRound:
    """Combine rounds taken one after the other into one."""
    return PipelineRound(
        median_round([each.compute for each in rounds]),
        tuple(float(value) for value in np.median([each.message_s for each in rounds], axis=0)),
        float(np.median([each.action_s for each in rounds])),
    )


def predict_step(workload: Workload, measured: PipelineRound, layout: Layout) -> Step:
    """Simulate a step of the stages on this machine, as a calibration round saw it."""
    cluster = pipeline_cluster(measured, layout.num_ranks)
    splits = SCHEDULES[layout.schedule].splits_backward
    costed = _with_actions(workload, Work(measured.action_s * cluster.device.matmul_flops_per_s), splits)
    return simulate(costed, cluster, layout.plan(), schedule=layout.make())


def pipeline_cluster(measured: PipelineRound, num_ranks: int) -> Cluster:
    """Fit a round to a cluster whose link carries messages between neighbours.

    What messages and computing cost each other is in the cost of an action, so the cluster has no contention.
    """
    cluster = fit_cluster(measured.compute, num_ranks)
    if num_ranks == 1:
        return cluster
    link = fit_steps(MESSAGE_BYTES, measured.message_s, Steps(1, 1.0), name="to the next rank", source="timed messages")
    return replace(cluster, intra_node=link, inter_node=link, contention=Contention())


def build_stages(model: GPTConfig, num_stages: int, seed: int, device: torch.device) -> list[nn.Module]:
    """Cut the small GPT into stages, the same on every rank."""
    whole = GPT(model, torch.Generator().manual_seed(seed)).to(device)
    return list(split_gpt(whole, num_stages))


def count_stages(stages: Sequence[nn.Module], inputs: torch.Tensor, targets: torch.Tensor) -> Workload:
    """Count the work of each stage on one micro-batch; a stage becomes one layer, the loss a part of the last.

    Pass stages of their own, which no pipeline runs.
    """
    chain = nn.Sequential(*stages)
    model = nn.ModuleDict({"stages": chain})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    counted = workload_from_module(
        model,
        lambda: GPT.loss(chain(inputs), targets),
        optimizer=optimizer,
        samples=len(inputs),
        name="stages of the small GPT",
    )
    *layers, last, loss = counted.layers
    return replace(counted, layers=(*layers, _together(last, loss)))


def _together(layer: Layer, loss: Layer) -> Layer:
    """Add the loss to the stage that ends with it."""
    return replace(
        layer,
        forward=layer.forward + loss.forward,
        input_gradient=layer.input_gradient + loss.input_gradient,
        weight_gradient=layer.weight_gradient + loss.weight_gradient,
        activation_bytes=layer.activation_bytes + loss.activation_bytes,
        logits_bytes=loss.logits_bytes,
    )


def _with_actions(workload: Workload, action: Work, splits_backward: bool) -> Workload:
    """Add the cost of an action to each stage's F and I, and to its W where that is an action of its own."""
    layers = tuple(
        replace(
            layer,
            forward=layer.forward + action,
            input_gradient=layer.input_gradient + action,
            weight_gradient=layer.weight_gradient + action if splits_backward else layer.weight_gradient,
        )
        for layer in workload.layers
    )
    return replace(workload, layers=layers)
