"""Mixtures of experts: blocks in which a router sends each token to the top k of E feed-forward parts.

Each expert is a feed-forward part with parameters of its own. Experts are whole wherever they are: tensor-parallel
ranks do not divide them. A part that every token passes (a shared expert) stays a region of the block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from distlab.plan import Experts, Layer, Region, Work
from simulator.models.parts import PASSES, Parts, Shapes, parameters, require_sizes

ROUTER_KERNELS = 8  # the product, softmax, top k, the orderings, and what adds rows up
# How often all rows are read and written: by rank before they leave, by expert where they arrive, and back.
# Source: NVIDIA/Megatron-LM, token_dispatcher.py, MoEAlltoAllTokenDispatcher, 2024.
ORDERINGS = 4


@dataclass(frozen=True)
class Mixture:
    """Experts of a block, and how many of them a token goes to.

    Attributes:
        num_experts: in each block that has them.
        top_k: experts that a token goes to.
        expert_size: width of an expert; None: of the feed-forward part.
        shared_size: width of the part that every token passes; 0: there is none.
        dense_layers: blocks at the start of the model that have a plain feed-forward part.
        every: of the blocks behind them, one in so many has experts: the last of each so many, counted from the first
            block of the model. 1: all have.
        router_bias: the router has a number per expert that balances loads (DeepSeek-V3).
        most_groups: groups of experts, and how many of them a token may go to (DeepSeek-V3); None: no limit.
    """

    num_experts: int
    top_k: int = 1
    expert_size: int | None = None
    shared_size: int = 0
    dense_layers: int = 0
    every: int = 1
    router_bias: bool = False
    most_groups: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        require_sizes(
            "experts", num_experts=self.num_experts, top_k=self.top_k, expert_size=self.expert_size, every=self.every
        )
        if self.top_k > self.num_experts:
            raise ValueError(f"experts: top_k is {self.top_k} of {self.num_experts} experts; choose at most all")
        for name in ("shared_size", "dense_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"experts: {name} is {getattr(self, name)!r}; pass 0 (none) or more")
        groups, most = self.most_groups or (1, 1)
        if not 1 <= most <= groups or self.num_experts % groups or self.top_k > self.num_experts // groups * most:
            raise ValueError(
                f"experts: a token goes to {most} of {groups} groups; groups must divide {self.num_experts} experts, "
                f"and those of a token hold {self.top_k}"
            )

    def has_experts(self, layer: int) -> bool:
        """Return whether a block, counted from 0, has experts."""
        return layer >= self.dense_layers and (layer + 1) % self.every == 0


def with_experts(block: Layer, expert: Region, shapes: Shapes, mixture: Mixture) -> Layer:
    """Return the block with experts behind its regions.

    Args:
        block: with a first parameter that ends in the hidden size, and without the part that the experts replace.
        expert: the work of one expert on all tokens; half of the bytes that its forward streams are kept.
        shapes: of one expert's parameters.
        mixture: how many there are.
    """
    h = block.parameter_shapes[0][-1]  # of the first norm, or of the products of queries
    tokens = block.output_bytes // (2 * h)
    rows, count = float(mixture.top_k), mixture.num_experts
    experts = _experts(expert, mixture, round(2 * rows * tokens * h))
    router = Work(2.0 * tokens * h * count, 8.0 * tokens * count + ORDERINGS * 2 * experts.row_bytes, ROUTER_KERNELS)
    router_parts: Parts = [((count, h), "")] + ([((count,), "")] if mixture.router_bias else [])
    parts = [*zip(block.parameter_shapes, block.parameter_axes, strict=True), *router_parts]
    parts += [(shape, "expert") for shape in shapes * count]
    kept = round(rows * expert.forward.memory_bytes / 2) + round(2 * 2 * rows * tokens * h) + 4 * tokens * count
    extra = (router, router, Work(router.matmul_flops, 0, 1))
    works = {
        name: getattr(block, name) + getattr(experts, name) + work for name, work in zip(PASSES, extra, strict=True)
    }
    return replace(block, **works, **parameters(parts), activation_bytes=block.activation_bytes + kept, experts=experts)


def _experts(expert: Region, mixture: Mixture, row_bytes: int) -> Experts:
    count, rows, kernels = mixture.num_experts, float(mixture.top_k), expert.forward.num_kernels
    forward = replace(expert.forward.times(rows), num_kernels=kernels * count)
    weights = Work(forward.matmul_flops, 0, kernels * count)
    each = tuple(part._replace(rows=math.ceil(part.rows * rows / count), divided="") for part in expert.products)
    return Experts(
        count,
        mixture.top_k,
        row_bytes,
        forward,
        forward,
        weights,
        kernels,
        products=each,
        most_groups=mixture.most_groups,
    )
