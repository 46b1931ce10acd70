"""Programs: a model on its ranks, trained by a plan, under one set of names whatever the plan.

`program_kind` chooses. A plan with only the data axis runs replicas of the whole model, with averaged, compressed or
sharded gradients. A plan with only the pipeline axis runs `Pipeline`; all others run `Hybrid`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.models import GPT, GPTConfig
from distlab.compression import make_hook
from distlab.data_parallel import DataParallel
from distlab.hybrid import Hybrid
from distlab.measure.count.gpt import count_gpt, merge_stages, without_accumulation
from distlab.measure.machine.ranks import mean_over_ranks, now
from distlab.pipeline import Pipeline, split_gpt
from distlab.plan import AXES, Plan, Schedule, Workload, make_schedule
from distlab.sharding import FullyShard, ShardedOptimizer
from distlab.trace import SpanWriter

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

LEARNING_RATE = 0.03
MOMENTUM = 0.9


def sgd(parameters: list[nn.Parameter], learning_rate: float = LEARNING_RATE) -> torch.optim.Optimizer:
    """Make the optimizer of every timed training."""
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=MOMENTUM)


def is_pipeline_alone(plan: Plan) -> bool:
    """Whether the plan is a pipeline and nothing else: no other axis, no sharding, recompute or precision."""
    return plan.pipeline == plan.world_size > 1 and _has_plain_passes(plan) and plan.sharding.stage == 0


def _has_plain_passes(plan: Plan) -> bool:
    return plan.recompute == "none" and plan.precision is None


def program_kind(plan: Plan, num_experts: int = 0) -> str:
    """Say what runs a plan: "replicas", "pipeline" or "hybrid"."""
    if num_experts:
        return "hybrid"
    if is_pipeline_alone(plan):
        return "pipeline"
    return "replicas" if plan.data == plan.world_size and _has_plain_passes(plan) else "hybrid"


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule that a plan names."""
    return make_schedule(plan.schedule, plan.pipeline, plan.num_microbatches, stages_per_rank=plan.stages_per_rank)


def count_model(
    config: GPTConfig, samples: int, plan: Plan, *, num_experts: int = 0, top_k: int = 2, device: torch.device
) -> Workload:
    """Count a micro-batch of the whole model in this process, as the plan's program runs it: stages are layers.

    Raises:
        ValueError: a pipeline of layers with experts.
    """
    whole = count_gpt(config, samples, num_experts=num_experts, top_k=top_k, device=device)
    if program_kind(plan, num_experts) == "replicas" and plan.sharding.stage:
        return without_accumulation(whole)
    return merge_stages(whole, plan.pipeline * plan.stages_per_rank)


@dataclass(frozen=True)
class Program:
    """How one rank takes part in training steps.

    Attributes:
        step: runs forward and backward of a batch that every rank has whole, and exchanges gradients; returns the loss.
        zero_grad: forgets the gradients.
        update: updates the parameters on all ranks; returns when the device has done it.
        mean_loss: makes a number of what `step` returned, the mean over the batch; all ranks call it.
        close: ends the program.
        weights: returns a copy of the whole parameters by name, on the CPU; all ranks call it. Only replicas have them.
        modules: this rank's parts of the model.
        groups: the ranks along each axis of a mesh.
    """

    step: Callable[[Tensor, Tensor], Any]
    zero_grad: Callable[[], None]
    update: Callable[[], None]
    mean_loss: Callable[[Any], float]
    close: Callable[[], None]
    weights: Callable[[], dict[str, Tensor]] = dict
    modules: Sequence[nn.Module] = ()
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)

    def train_step(self, inputs: Tensor, targets: Tensor) -> Any:
        """Run one whole step; return what `mean_loss` takes."""
        self.zero_grad()
        loss = self.step(inputs, targets)
        self.update()
        return loss


def make_program(
    model: GPT,
    plan: Plan,
    make_optimizer: MakeOptimizer,
    *,
    device: torch.device,
    kind: str,
    order: Sequence[str] = AXES,
    spans: SpanWriter | None = None,
) -> Program:
    """Let all ranks train a model by a plan, from the first rank's weights; every rank calls this.

    Args:
        model: the same on every rank.
        plan: how the ranks share the work.
        make_optimizer: makes the optimizer of what a rank updates.
        device: where this rank computes.
        kind: as `program_kind` says.
        order: axes of the mesh, slowest first.
        spans: marks what the rank does, under the names of a simulated step.

    Raises:
        ValueError: the plan is not one that runs here; the text says what to use.
    """
    model = model.to(device)
    if kind == "pipeline":
        return _pipeline_program(model, plan, make_optimizer, device, spans)
    if kind == "replicas":
        return _replica_program(model, plan, make_optimizer, device, spans)
    hybrid = Hybrid(model, plan, make_optimizer, order=order, spans=spans)

    def update() -> None:
        hybrid.update()
        now(device)

    return Program(
        hybrid.step,
        hybrid.zero_grad,
        update,
        float,
        hybrid.close,
        modules=tuple(hybrid.stages.values()),
        groups=hybrid.groups,
    )


def _pipeline_program(
    model: GPT, plan: Plan, make_optimizer: MakeOptimizer, device: torch.device, spans: SpanWriter | None
) -> Program:
    schedule = schedule_of(plan)
    modules = split_gpt(model, schedule.num_stages)
    own = {stage: modules[stage] for stage, home in enumerate(schedule.home) if home == dist.get_rank()}
    pipeline = Pipeline(own, schedule, loss=GPT.loss, spans=spans)
    optimizer = make_optimizer(list(pipeline.parameters()))

    def update() -> None:
        with _span(spans, "optimizer", "optimizer"):
            optimizer.step()

    return Program(
        pipeline.step,
        pipeline.zero_grad,
        update,
        pipeline.mean_loss,
        pipeline.close,
        modules=tuple(own.values()),
    )


def _replica_program(
    model: GPT, plan: Plan, make_optimizer: MakeOptimizer, device: torch.device, spans: SpanWriter | None
) -> Program:
    """Train a replica per rank on its share of the samples; only the last micro-batch's backward sends gradients."""
    replicas = _make_replicas(model, plan, make_optimizer, spans)
    called: nn.Module = replicas if isinstance(replicas, FullyShard) else model
    optimizer = replicas if isinstance(replicas, ShardedOptimizer) else make_optimizer(list(called.parameters()))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        own = (whole.chunk(plan.data)[dist.get_rank()].chunk(plan.num_microbatches) for whole in (inputs, targets))
        microbatches = list(zip(*own, strict=True))
        total = torch.zeros((), device=device)
        for left, (part, wanted) in zip(range(len(microbatches) - 1, -1, -1), microbatches, strict=True):
            with replicas.no_sync() if left else contextlib.nullcontext():
                with _span(spans, "forward", "F"):
                    loss = model.loss(called(part), wanted) / len(microbatches)
                with _span(spans, "backward", "B"):
                    loss.backward()
            total += loss.detach()
        with _span(spans, "synchronize", "wait"):
            replicas.synchronize()
        return total

    def update() -> None:
        with _span(spans, "optimizer", "optimizer"):
            optimizer.step()

    def weights() -> dict[str, Tensor]:
        with replicas.summon() if isinstance(replicas, FullyShard) else contextlib.nullcontext(model) as whole:
            return {name: parameter.detach().cpu().clone() for name, parameter in whole.named_parameters()}

    return Program(
        step,
        replicas.zero_grad,
        update,
        lambda loss: mean_over_ranks([float(loss)], device)[0],
        lambda: None,
        weights,
        (model,),
    )


def _make_replicas(
    model: GPT, plan: Plan, make_optimizer: MakeOptimizer, spans: SpanWriter | None
) -> DataParallel | ShardedOptimizer | FullyShard:
    """Choose what exchanges gradients among replicas, or shards them."""
    sharding = plan.sharding
    if sharding.replicas > 1 or sharding.unit_layers > 1 or sharding.offload == "optimizer":
        raise ValueError(
            f"{sharding}: this measures stages 1 to 3 over all ranks, with one block per unit, and with nothing or "
            "everything offloaded; use replicas=1, unit_layers=1 and offload 'none' or 'all'"
        )
    if sharding.stage == 3:
        return FullyShard(
            model,
            reshard_after_forward=sharding.reshard_after_forward,
            prefetch=sharding.prefetch,
            offload=sharding.offload == "all",
            spans=spans,
        )
    if sharding.stage:
        size = plan.bucket_bytes
        return ShardedOptimizer(model, make_optimizer, stage=sharding.stage, bucket_bytes=size, spans=spans)
    return DataParallel(
        model,
        bucket_bytes=plan.bucket_bytes,
        first_bucket_bytes=plan.first_bucket_bytes,
        spans=spans,
        hook=None if plan.compression is None else make_hook(plan.compression),
    )


def _span(spans: SpanWriter | None, name: str, kind: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if spans is None else spans.span(name, kind=kind)
