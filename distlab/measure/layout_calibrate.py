"""Calibrate for a layout: how fast ranks compute, what its calls cost, and what a block's pass costs beside both.

The last is read off two GPTs of other sizes than the one to be predicted, trained by the same plan: what their steps
take beyond what the simulator makes of them is shared among their passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.hybrid import Hybrid
from distlab.measure.calibrate import Reference, measure_round, now
from distlab.measure.layout_calls import measure_layout_calls
from distlab.measure.layout_predict import LayoutRound, num_blocks, num_cores, predict_layout, predicted_step_s
from distlab.measure.layout_workload import count_gpt, make_gpt, merge_stages
from distlab.models import GPTConfig
from distlab.plan.records import Plan, Work, Workload

REFERENCES = (Reference(64, 1, 96, 2), Reference(96, 1, 48, 4))  # so many blocks more than the fewest that fit
REPEATS = 4
GUESSES = 4


@dataclass(frozen=True)
class _Busy:
    """A reference model on its ranks."""

    step: Callable[[], float]
    workload: Workload
    close: Callable[[], None]


class LayoutCalibration:
    """Reference models, laid out once and timed in each round.

    Every rank makes one, and calls `measure` and `close` at the same time as the others.

    Args:
        plan: of the run to be predicted.
        order: of its axes, slowest first.
        groups: the ranks along each axis.
        device: where ranks compute.
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
        num_experts: int = 0,
        top_k: int = 2,
    ) -> None:
        self.plan, self.order, self.groups, self.device = plan, tuple(order), groups, device
        self._works: dict[str, Work] = {}
        self._busy = [self._make(reference, num_experts, top_k) for reference in REFERENCES]

    def measure(self) -> LayoutRound:
        """Take one round of measurements."""
        compute = measure_round(self.device, works=self._works)
        measured = LayoutRound(compute, measure_layout_calls(self.plan, self.groups, self.device))
        costs = []
        for busy in self._busy:
            seconds = float(np.median([busy.step() for _ in range(REPEATS + 1)][1:]))  # the first warms up
            costs.append(self._pass_s(busy.workload, measured, seconds))
        return replace(measured, pass_s=float(np.mean(costs)))

    def close(self) -> None:
        """End the reference models."""
        for busy in self._busy:
            busy.close()

    def _pass_s(self, workload: Workload, measured: LayoutRound, seconds: float) -> float:
        """Find the cost of a pass with which the simulated step takes as long as the measured one."""
        blocks = sum(num_blocks(layer) for layer in workload.layers) / self.plan.pipeline
        on_the_way = 2 * blocks * self.plan.num_microbatches
        pass_s = 0.0
        for _ in range(GUESSES):
            step = predict_layout(workload, replace(measured, pass_s=pass_s), self.plan, order=self.order)
            left = seconds - predicted_step_s(step, num_cores())
            pass_s = max(0.0, pass_s + left / on_the_way)
        return pass_s

    def _make(self, reference: Reference, num_experts: int, top_k: int) -> _Busy:
        plan, device = self.plan, self.device
        stages = plan.pipeline * plan.stages_per_rank
        config = reference_sizes(reference, plan)
        samples = reference.samples * plan.num_microbatches * plan.num_replicas
        counted = count_gpt(config, reference.samples, num_experts=num_experts, top_k=top_k, device=device)
        model = make_gpt(config, 0, num_experts=num_experts, top_k=top_k).to(device)
        hybrid = Hybrid(model, plan, _no_change, order=self.order)
        tokens = torch.randint(config.vocab_size, (samples, config.context), generator=torch.Generator().manual_seed(0))
        tokens = tokens.to(device)

        def step() -> float:
            dist.barrier()
            begin = now(device)
            hybrid.train_step(tokens, tokens)
            return largest([now(device) - begin], device)[0]

        return _Busy(step, merge_stages(counted, stages), hybrid.close)


def reference_sizes(reference: Reference, plan: Plan) -> GPTConfig:
    """Return a model about as large as the reference that the plan can split."""
    num_heads = _multiple(4, plan.tensor * plan.context)
    positions = plan.context * plan.tensor * (2 if plan.context > 1 else 1)
    return GPTConfig(
        num_layers=plan.pipeline * plan.stages_per_rank * (1 + reference.num_layers),
        num_heads=num_heads,
        hidden_size=_multiple(reference.hidden_size, num_heads),
        context=_multiple(reference.context, positions),
        tied=False,
    )


def _multiple(least: int, divisor: int) -> int:
    """Return the smallest multiple of divisor that is at least so large."""
    return -(-least // divisor) * divisor


def _no_change(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-6, momentum=0.9)


def largest(values: list[float], device: torch.device) -> list[float]:
    """Return the largest of each over all ranks."""
    most = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return [float(value) for value in most]
