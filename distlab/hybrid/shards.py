"""Sharded states on a mesh: what lies on a rank after the other axes have cut the model is what its copies share out.

Sharding needs to know nothing of the other axes. A tensor-parallel rank's half of a layer is a layer to it, and the
ranks that hold the same half are the group. Two things must be minded here. Experts have other copies than the rest, so
they are sharded apart (stages 1 and 2). And a flat shard may begin in a parameter that tensor-parallel ranks split, and
end in one that all have whole. So the norm of gradients goes by pieces, not by shards.

Symbols: n copies of all but the experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from distlab.blocks.clip import Gradient
from distlab.blocks.models import Block
from distlab.blocks.modules.blocks import find_blocks
from distlab.hybrid.build import Built, counts_here, divide_, split_experts, tied_parameters
from distlab.hybrid.gradients import GradientAveraging, MakeOptimizer, ParameterBag
from distlab.hybrid.layout import Layout
from distlab.pipeline import Pipeline
from distlab.sharding import FullyShard, ShardedOptimizer
from distlab.sharding.cut_layers import CutLayers
from distlab.sharding.part import plain


class ShardedStates(GradientAveraging):
    """Stages 1 and 2: each copy updates a part of what they hold; gradients go there, new values come back.

    Cost: a reduce-scatter and an all-gather, (n-1)/n of the parameters' bytes each; stage 2 has a reduce-scatter per
        micro-batch (where a schedule splits backward, one more of what I makes).
    """

    def _wrap(self, make_optimizer: MakeOptimizer) -> None:
        built, layout, plan, pipeline = self._built, self._layout, self._layout.plan, self._pipeline
        self.sharded: list[ShardedOptimizer] = []
        self._of_experts: list[ShardedOptimizer] = []
        of_stage: dict[int, list[ShardedOptimizer]] = {}
        for named, number in _parts(self.named, built, layout, pipeline):
            for own, group in zip(
                split_experts(named, built, layout), (layout.copies, layout.expert_copies), strict=True
            ):
                if not own:
                    continue
                one = ShardedOptimizer(
                    ParameterBag(own),
                    make_optimizer,
                    group,
                    stage=1 if number is None else plan.sharding.stage,
                    bucket_bytes=plan.bucket_bytes,
                    spans=self._spans,
                )
                one.cut = CutLayers(built.splits, layout.groups["tensor"])
                self.sharded.append(one)
                if number is not None and pipeline is not None:
                    of_stage.setdefault(number, []).append(one)
                if group is not layout.copies:
                    self._of_experts.append(one)
        self.wrappers, self.of_stage = self.sharded, of_stage
        self.optimizers = [one.optimizer for one in self.sharded]

    def finish(self) -> None:
        """Finish the step; an expert's sum is divided by the ranks that have other experts too."""
        super().finish()
        for experts in self._of_experts:
            divide_((piece for _, piece in experts.named_pieces()), self._layout.plan.expert)

    def gradients(self) -> Iterator[Gradient]:
        """Yield the gradient of each piece that this rank owns."""
        for one in self.sharded:
            for name, piece in one.named_pieces():
                if piece.grad is not None:
                    counts = counts_here(self._built, self._layout, name, sharded=True)
                    yield Gradient(name, plain(piece.grad), counts)

    def update(self) -> None:
        """Update this rank's shards, then send the new values to all replicas."""
        for one in self.sharded:
            one.step()


class ShardedParameters(GradientAveraging):
    """Stage 3: each copy holds a part of everything, and blocks are whole only while they compute.

    Attributes:
        models: by number of the stage, the module that is called in its place.

    Cost: as `FullyShard`: 3 (n-1)/n of the parameters' bytes; per micro-batch the two thirds of it that gather.
    """

    def _wrap(self, make_optimizer: MakeOptimizer) -> None:
        layout, plan = self._layout, self._layout.plan
        self.models = {
            number: FullyShard(
                module,
                layout.copies,
                units=None if plan.pipeline == 1 else list(find_blocks(module, Block)),
                reshard_after_forward=plan.sharding.reshard_after_forward,
                prefetch=plan.sharding.prefetch,
                precision=plan.precision,
                spans=self._spans,
            )
            for number, module in self._built.stages.items()
        }
        self.wrappers = list(self.models.values())
        self.of_stage = {number: [model] for number, model in self.models.items()}
        self.optimizers = [
            make_optimizer([p for p in model.parameters() if p.requires_grad]) for model in self.models.values()
        ]

    def gradients(self) -> Iterator[Gradient]:
        """Yield the gradients of all shards, parameter by parameter."""
        for unit in (unit for model in self.models.values() for unit in model.units):
            if unit.shard.grad is None:
                continue
            for piece, values in zip(unit.shard.pieces, unit.shard.cut(plain(unit.shard.grad)), strict=True):
                yield Gradient(piece.name, values, counts_here(self._built, self._layout, piece.name, sharded=True))


def _parts(
    named: Mapping[str, nn.Parameter], built: Built, layout: Layout, pipeline: Pipeline | None
) -> Iterator[tuple[dict[str, nn.Parameter], int | None]]:
    """Yield parameters that are sharded together, with their stage; None: their gradients stay whole."""
    if pipeline is None or layout.plan.sharding.stage == 1:
        yield dict(named), None if layout.plan.sharding.stage == 1 else 0
        return
    late = set(map(id, tied_parameters(named, built)))  # their stages exchange gradients when the step ends
    yield {name: parameter for name, parameter in named.items() if id(parameter) in late}, None
    for number, module in built.stages.items():
        here = {id(parameter) for parameter in module.parameters()} - late
        waits = set(pipeline.splits[number].deferred) if number in pipeline.splits else set()
        for in_w in (True, False):
            own = {n: p for n, p in named.items() if id(p) in here and (n.rpartition(".")[0] in waits) == in_w}
            yield own, number
