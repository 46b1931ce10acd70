"""Calibrate for a plan: a round measures the machine's speed, the plan's calls and codec, and the overhead of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.distributed import ProcessGroup

from distlab.measure.count.expert_load import measure_alone_speedup
from distlab.measure.machine.speed import fit_cluster, measure_round
from distlab.measure.runs.calls import measure_calls
from distlab.measure.runs.codec import measure_codec
from distlab.measure.runs.overhead import MANY_LAYERS, StepOverhead
from distlab.measure.runs.predict import CalibrationRound
from distlab.plan import Plan, Work


class CalibrationOfRun:
    """What a run's rounds measure. Every rank makes one, and calls the methods at the same time as the others.

    Args:
        plan: of the run to be predicted.
        order: of its axes, slowest first.
        groups: the ranks along each axis of a mesh; {} for other programs.
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
        self.plan, self.groups, self.device = plan, groups, device
        self._works: dict[str, Work] = {}
        sizes = {"num_layers": num_layers, "num_experts": num_experts, "top_k": top_k}
        self._overhead = StepOverhead(plan, order, device, **sizes)

    def measure(self) -> CalibrationRound:
        """Take one round of measurements: the same result on every rank."""
        plan, device = self.plan, self.device
        compute, codec = measure_round(device, works=self._works), None
        if plan.compression is not None:
            codec = measure_codec(plan.compression, fit_cluster(compute, plan.world_size), device=device)
        alone_speedup = measure_alone_speedup(device) if plan.expert > 1 else 1.0
        measured = CalibrationRound(compute, measure_calls(plan, self.groups, device), codec, alone_speedup)
        return replace(measured, overhead=self._overhead.measure(measured))

    def close(self) -> None:
        """Stop the threads that train the reference models."""
        self._overhead.close()
