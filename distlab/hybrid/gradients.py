"""Which gradient is summed over which ranks, and when: forget a line of this table and training goes on, but wrongly.

A rank's loss is the mean over its own samples and positions; the batch's is the mean of these over data, expert and
context (n = d e c ranks; all have as many tokens). So gradients are averaged over those, and everything else that has
to be summed was summed by the layers themselves, in backward:

| parameter                                | over data, context | over expert      | over tensor  | over stages |
|------------------------------------------|--------------------|------------------|--------------|-------------|
| split by tensor (weights of attention)   | mean               | mean             | its own part | its own     |
| whole on tensor ranks (norms, positions) | mean               | mean             | equal (1)    | its own     |
| an expert's                              | sum, / n           | / n only (2)     | its own part | its own     |
| tied: token embedding and output         | mean               | mean             | its own part | sum (3)     |

1. Each rank has the whole gradient; with sequence_parallel its layers summed it, over the positions of all.
2. The expert's one owner along this axis has had all ranks' tokens: its gradient is the sum already.
3. Both stages have a part of the gradient and exchange it when the step ends (`distlab.pipeline.model.tied`); only then
   can it be averaged: what was on its way before would lack the other's part.

Means are exchanged while backward computes. Without a pipeline that is in buckets (`distlab.data_parallel`), compressed
where the plan says so. With one it is stage by stage, as soon as the stage's last micro-batch has passed. Sharded
states send halves of it: see `shards`.

Then the norm of all gradients is that of one process, where each element of the model counts once. Here axes meet, and
real libraries went wrong:

| of this axis                     | forgotten                                   | so that                     |
|----------------------------------|---------------------------------------------|-----------------------------|
| pipeline: its own part           | norm of the own stage alone                 | under-clips; stages differ  |
| tensor: parts, and equal copies  | equal copies counted once per rank          | over-clips                  |
| tensor: parts, and equal copies  | norm of the own part alone                  | ranks scale by other numbers|
| expert: other experts            | own experts alone                           | copies of the rest drift    |
| data, context: equal copies      | summed like parts                           | over-clips by sqrt(n)       |
| data, sharded: pieces            | norm of the own shard alone                 | copies drift                |
| tied weights on two stages       | counted on both                             | over-clips                  |

One rule covers all: of all ranks that hold equal copies of an element one counts it (`build.counts_here`); then squares
are summed over the whole mesh, and every rank has the same bits (`distlab.blocks.clip.clip_counted_`).

Symbols: n copies of all but the experts, m of an expert: d c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from distlab.blocks.clip import Gradient
from distlab.compression import make_hook
from distlab.data_parallel import DataParallel
from distlab.hybrid.build import Built, counts_here, divide_, named_parameters, split_experts, tied_parameters
from distlab.hybrid.layout import Layout
from distlab.hybrid.stage_averages import StageAverages
from distlab.pipeline import Pipeline
from distlab.sharding import FullyShard, ShardedOptimizer
from distlab.trace import SpanWriter

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Wrapper = DataParallel | ShardedOptimizer | FullyShard


class GradientAveraging:
    """Makes gradients those of the whole batch, and updates what this rank has to update.

    Attributes:
        wrappers: what averages gradients during backward, each over a group of its own.
        of_stage: by number of a pipeline's stage, those of them that average in the stage's last backward pass.
        optimizers: made of this rank's parameters, or pieces.
        named: this rank's parameters, by their names in the whole model.
    """

    wrappers: Sequence[Wrapper] = ()
    of_stage: Mapping[int, Sequence[Wrapper]] = {}
    optimizers: list[torch.optim.Optimizer]

    def __init__(
        self,
        built: Built,
        layout: Layout,
        make_optimizer: MakeOptimizer,
        *,
        pipeline: Pipeline | None = None,
        spans: SpanWriter | None = None,
    ) -> None:
        self._layout, self._built, self._pipeline, self._spans = layout, built, pipeline, spans
        self.named = named_parameters(built)
        self._wrap(make_optimizer)

    def _wrap(self, make_optimizer: MakeOptimizer) -> None:
        """Make what averages gradients, and the optimizers."""
        raise NotImplementedError

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Do not average what the backward passes inside compute: all of a step's but the last run in this block."""
        with ExitStack() as stack:
            for one in self.wrappers:
                stack.enter_context(one.no_sync())
            yield

    @contextmanager
    def accumulating_in(self, pipeline: Pipeline) -> Iterator[None]:
        """Do not average a stage's gradients before its last backward pass."""
        with ExitStack() as to_the_end:
            until_last = {number: to_the_end.enter_context(ExitStack()) for number in self.of_stage}
            ends_early = {id(one): until_last[number] for number, own in self.of_stage.items() for one in own}
            for one in self.wrappers:
                ends_early.get(id(one), to_the_end).enter_context(one.no_sync())

            def send(number: int) -> None:
                if number in until_last:
                    until_last[number].close()

            pipeline.on_last_backward = send
            yield

    def finish(self) -> None:
        """Finish the step: gradients are those of the whole batch."""
        for one in self.wrappers:
            one.synchronize()

    def gradients(self) -> Iterator[Gradient]:
        """Yield what is here, each piece once."""
        raise NotImplementedError

    def update(self) -> None:
        """Update, and bring new values to the ranks that need them."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for one in self.wrappers:
            one.zero_grad()

    def close(self) -> None:
        """Take the hooks off the model."""
        for one in self.wrappers:
            one.close()


class ParameterBag(nn.Module):
    """Some of a model's parameters, under the names that they have there: for what takes a module."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in named.items():
            self.register_parameter(name.replace(".", "/"), parameter)

    def named_parameters(self, *args: object, **options: object) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by the names that they have in the model."""
        for name, parameter in self._parameters.items():
            assert parameter is not None, "none was put in"
            yield name.replace("/", "."), parameter


class WholeGradients(GradientAveraging):
    """Stage 0: every rank keeps whole gradients and updates all that it holds.

    Attributes:
        hooks: what compresses gradients, where the plan says so; each remembers what it left out.

    Cost: an all-reduce of 2 (n-1)/n of the gradients' bytes, and 2 (m-1)/m of the experts'. With compression for each
        bucket what `distlab.plan.compression.exchanges` says, and an all-reduce of one element.
    """

    def _wrap(self, make_optimizer: MakeOptimizer) -> None:
        built, layout, pipeline, spans = self._built, self._layout, self._pipeline, self._spans
        dense, experts = split_experts(self.named, built, layout)
        self._replicas: list[tuple[DataParallel, int]] = []
        self._averages: StageAverages | None = None
        if pipeline is not None and layout.plan.copies > 1:
            self._averages = StageAverages(
                pipeline,
                built.stages,
                layout.copies,
                experts=list(experts.values()),
                expert_group=layout.expert_copies,
                late=tied_parameters(self.named, built),
                spans=spans,
            )
        elif layout.plan.copies > 1:
            self._replicas = list(_replicas(dense, experts, layout, spans))
            self.wrappers = [replicas for replicas, _ in self._replicas]
        self.hooks = [replicas.hook for replicas, _ in self._replicas if replicas.hook is not None]
        self.optimizers = [make_optimizer([p for p in self.named.values() if p.requires_grad])]

    def finish(self) -> None:
        """Finish the step, stage by stage where there is a pipeline."""
        if self._averages is not None:
            self._averages.finish()
        for replicas, also_divide in self._replicas:
            replicas.synchronize()
            if also_divide > 1:
                divide_(replicas.module.parameters(), also_divide)

    def gradients(self) -> Iterator[Gradient]:
        """Yield the gradient of each parameter that is here."""
        for name, parameter in self.named.items():
            if parameter.grad is not None:
                yield Gradient(name, parameter.grad, counts_here(self._built, self._layout, name))

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.named.values():
            parameter.grad = None


def _replicas(
    dense: Mapping[str, nn.Parameter], experts: Mapping[str, nn.Parameter], layout: Layout, spans: SpanWriter | None
) -> Iterator[tuple[DataParallel, int]]:
    """Yield an averager for each group of copies, and a further divisor of its means."""
    for named, group, divisor in ((dense, layout.copies, 1), (experts, layout.expert_copies, layout.plan.expert)):
        if named:
            yield (
                DataParallel(
                    ParameterBag(named),
                    group,
                    bucket_bytes=layout.plan.bucket_bytes,
                    first_bucket_bytes=layout.plan.first_bucket_bytes,
                    spans=spans,
                    hook=None if layout.plan.compression is None else make_hook(layout.plan.compression),
                ),
                divisor,
            )
