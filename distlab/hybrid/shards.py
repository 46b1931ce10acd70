"""Sharded states on a mesh: what lies on a rank after the other axes have cut the model is what its copies share out.

Sharding needs to know nothing of the other axes. A tensor-parallel rank's half of a layer is a layer to it, and the
ranks that hold the same half are the group. Two things must be minded here. Experts have other copies than the rest, so
they are sharded apart (stages 1 and 2). And a flat shard may begin in a parameter that tensor-parallel ranks split and
end in one that all have whole, so the norm of gradients goes by pieces, not by shards.

Symbols: n copies of all but the experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

from distlab.hybrid.build import Built
from distlab.hybrid.gradients import Gradient, GradientAveraging, MakeOptimizer, ParameterBag
from distlab.hybrid.holdings import counts_here, divide_, named_parameters, split_experts
from distlab.hybrid.layout import Layout
from distlab.sharding import FullyShard, ShardedOptimizer
from distlab.trace import SpanWriter


class ShardedStates(GradientAveraging):
    """Stages 1 and 2: each copy updates a part of what they hold; gradients go there, new values come back.

    Cost: a reduce-scatter and an all-gather, (n-1)/n of the parameters' bytes each.
    """

    def __init__(
        self, built: Built, layout: Layout, make_optimizer: MakeOptimizer, *, spans: SpanWriter | None = None
    ) -> None:
        self._layout, self._built, plan = layout, built, layout.plan
        self.named = named_parameters(built.stages)
        dense, experts = split_experts(self.named, built, layout)
        self.sharded = [
            ShardedOptimizer(
                ParameterBag(named),
                make_optimizer,
                group,
                stage=plan.sharding.stage,
                bucket_bytes=plan.bucket_bytes,
                spans=spans,
            )
            for named, group in ((dense, layout.copies), (experts, layout.expert_copies))
            if named
        ]
        self.wrappers = self.sharded
        self.optimizers = [one.optimizer for one in self.sharded]

    def finish(self) -> None:
        """Finish the step; an expert's sum is divided by the ranks that have other experts too."""
        super().finish()
        for experts in self.sharded[1:]:
            divide_((piece for _, piece in experts.named_pieces()), self._layout.plan.expert)

    def gradients(self) -> Iterator[Gradient]:
        """Yield the gradient of each piece that this rank owns."""
        for one in self.sharded:
            for name, piece in one.named_pieces():
                if piece.grad is not None:
                    counts = counts_here(self._built, self._layout, name, sharded=True)
                    yield Gradient(name, piece.grad.detach(), counts)

    def update(self) -> None:
        """Update this rank's shards, then send the new values to all replicas."""
        for one in self.sharded:
            one.step()


class ShardedParameters(GradientAveraging):
    """Stage 3: each copy holds a part of everything, and blocks are whole only while they compute.

    Attributes:
        model: the module that is called in place of the stage's.

    Cost: as `FullyShard`: 3 (n-1)/n of the parameters' bytes; per micro-batch the two thirds of it that gather.
    """

    def __init__(
        self, built: Built, layout: Layout, make_optimizer: MakeOptimizer, *, spans: SpanWriter | None = None
    ) -> None:
        self._layout, self._built, plan = layout, built, layout.plan
        self.model = FullyShard(
            built.stages[0],
            layout.copies,
            reshard_after_forward=plan.sharding.reshard_after_forward,
            prefetch=plan.sharding.prefetch,
            precision=plan.precision,
            spans=spans,
        )
        self.wrappers = [self.model]
        self.optimizers = [make_optimizer([p for p in self.model.parameters() if p.requires_grad])]

    def gradients(self) -> Iterator[Gradient]:
        """Yield the gradients of all shards, parameter by parameter."""
        for unit in self.model.units:
            if unit.shard.grad is None:
                continue
            for piece in unit.layout.pieces(dist.get_rank(self._layout.copies)):
                name = unit.layout.names[piece.tensor]
                values = unit.shard.grad[piece.offset : piece.offset + piece.stop - piece.start]
                yield Gradient(name, values, counts_here(self._built, self._layout, name, sharded=True))
