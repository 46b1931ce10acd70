"""Calibrate for a layout: how fast ranks compute, what its calls cost, and what a block's pass costs beside both.

The last is read off two GPTs of other sizes than the one to be predicted, trained by the same plan: what their steps
take beyond what the simulator makes of them is shared among their passes. One is small and one is large, since a part
of it grows with the rows that a block hands on: they are cut, copied and put together again on the way to a call.
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
from distlab.measure.count.expert_load import loads_of, measure_alone, with_loads
from distlab.measure.count.gpt import count_gpt, make_gpt, merge_stages
from distlab.measure.machine.facts import num_cores
from distlab.measure.machine.once import on_first_rank
from distlab.measure.machine.speed import Reference, measure_round, now
from distlab.measure.runs.layout_calls import measure_layout_calls
from distlab.measure.runs.layout_predict import (
    LayoutRound,
    PassCost,
    num_blocks,
    predict_layout,
    predicted_step_s,
    row_bytes,
)
from distlab.models import GPTConfig
from distlab.plan import Plan, Work, Workload

# So many blocks more than the fewest that fit, and so many samples in all micro-batches of all replicas: one small
# reference, whose passes cost what a pass costs at least, and one with nearly as much to copy as a model worth timing.
REFERENCES = (Reference(64, 1, 48, 2), Reference(96, 1, 96, 10))
REPEATS = 4
GUESSES = 4
EXACT = 1e-4  # of a step: as close as a guess has to come


@dataclass(frozen=True)
class _Busy:
    """A reference model on its ranks."""

    step: Callable[[], float]
    loads: Callable[[], tuple[float, ...]]
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
        self._workloads = on_first_rank(lambda: [self._count(each, num_experts, top_k) for each in REFERENCES])

    def measure(self) -> LayoutRound:
        """Take one round of measurements."""
        compute = measure_round(self.device, works=self._works)
        calls = measure_layout_calls(self.plan, self.groups, self.device)
        alone = measure_alone(self.device) if self.plan.expert > 1 else 1.0
        measured = LayoutRound(compute, calls, alone=alone)
        seconds = [float(np.median([busy.step() for _ in range(REPEATS + 1)][1:])) for busy in self._busy]  # one warms
        loads = [busy.loads() for busy in self._busy]

        def passes() -> tuple[PassCost, ...]:
            loaded = [with_loads(*pair, self.plan, alone=alone) for pair in zip(self._workloads, loads, strict=True)]
            return tuple(self._pass(*pair, measured) for pair in zip(loaded, seconds, strict=True))

        return replace(measured, passes=on_first_rank(passes))

    def close(self) -> None:
        """End the reference models."""
        for busy in self._busy:
            busy.close()

    def _pass(self, workload: Workload, seconds: float, measured: LayoutRound) -> PassCost:
        """Find the cost of a pass with which the simulated step takes as long as the measured one.

        It is below zero where the step took less than its work: noise, of which the median over rounds is taken.
        """
        blocks = sum(num_blocks(layer) for layer in workload.layers) / self.plan.pipeline
        on_the_way = 2 * blocks * self.plan.num_microbatches
        num_bytes = next(row_bytes(layer) for layer in workload.layers if row_bytes(layer))
        pass_s = 0.0
        for _ in range(GUESSES):
            guess = replace(measured, passes=(PassCost(num_bytes, max(0.0, pass_s)),))
            left = seconds - predicted_step_s(predict_layout(workload, guess, self.plan, order=self.order), num_cores())
            pass_s += left / on_the_way
            if pass_s < 0 or abs(left) < EXACT * seconds:
                break
        return PassCost(num_bytes, pass_s)

    def _make(self, reference: Reference, num_experts: int, top_k: int) -> _Busy:
        plan, device = self.plan, self.device
        config = reference_sizes(reference, plan)
        samples = reference_samples(reference, plan) * plan.num_microbatches * plan.num_replicas
        model = make_gpt(config, 0, num_experts=num_experts, top_k=top_k).to(device)
        hybrid = Hybrid(model, plan, _no_change, order=self.order)
        tokens = torch.randint(config.vocab_size, (samples, config.context), generator=torch.Generator().manual_seed(0))
        tokens = tokens.to(device)

        def step() -> float:
            dist.barrier()
            begin = now(device)
            hybrid.train_step(tokens, tokens)
            return largest([now(device) - begin], device)[0]

        return _Busy(step, lambda: loads_of(hybrid.stages.values(), plan, device), hybrid.close)

    def _count(self, reference: Reference, num_experts: int, top_k: int) -> Workload:
        config = reference_sizes(reference, self.plan)
        samples = reference_samples(reference, self.plan)
        whole = count_gpt(config, samples, num_experts=num_experts, top_k=top_k, device=self.device)
        return merge_stages(whole, self.plan.pipeline * self.plan.stages_per_rank)


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


def reference_samples(reference: Reference, plan: Plan) -> int:
    """Return the samples of a micro-batch of a replica, one at least."""
    return -(-reference.samples // (plan.num_microbatches * plan.num_replicas))


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
