"""GPT experts: blocks whose feed-forward part is a mixture of experts.

A router sends each token to the top k of E experts. Each is a feed-forward part of the same width, with 8 h^2 + 5 h
parameters of its own. Experts are whole wherever they are: tensor-parallel ranks do not divide them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from distlab.plan import Experts, Layer, Work, Workload
from distlab.plan.require import require_count
from simulator.models.gpt import adam_work, gpt_name

EXPERT_KERNELS = 3  # two products and the GELU
ROUTER_KERNELS = 6  # the product, softmax, top k, and what puts rows in order, and back, and adds them up


@dataclass(frozen=True)
class Mixture:
    """Experts of each block, how many of them a token goes to, and what bounds an expert's rows."""

    num_experts: int
    top_k: int
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        require_count("GPT", num_experts=self.num_experts, top_k=self.top_k)
        if self.top_k > self.num_experts:
            raise ValueError(f"GPT: top_k is {self.top_k} of {self.num_experts} experts; choose at most all of them")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"GPT: capacity_factor is {self.capacity_factor!r}; pass a factor above 0, or None")

    @property
    def rows_per_token(self) -> float:
        """Rows that reach an expert when loads are even."""
        return self.top_k * min(1.0, self.capacity_factor or 1.0)


def mix_experts(
    workload: Workload, num_experts: int, *, top_k: int = 1, capacity_factor: float | None = None
) -> Workload:
    """Return a GPT's workload with a mixture of experts in place of the feed-forward part of each block.

    Each of the experts is as wide as the part that it replaces; a token goes to `top_k` of them. `capacity_factor`
    bounds an expert's rows to so many times an even load (None: no bound), which drops rows of an even load where it is
    below 1.

    Args:
        workload: as `simulator.gpt_workload` makes it.
        num_experts: of each block.
        top_k: experts that a token goes to.
        capacity_factor: rows that an expert takes, over those of an even load.

    Cost: forward (8 + 16 k) B s h^2 + 2 B s h E FLOPs per layer in place of 24 B s h^2.

    Raises:
        ValueError: a number that cannot be, or a workload without a GPT's blocks, or with experts already.
    """
    mixture = Mixture(num_experts, top_k, capacity_factor)
    kinds = dict(zip(workload.kinds, workload.layers, strict=True))  # of layers that differ in their name alone, one
    blocks = {
        kind: _with_experts(layer, mixture)
        for kind, layer in kinds.items()
        if layer.regions and layer.regions[-1].name == "feed-forward"
    }
    if not blocks:
        raise ValueError(f"{workload.name} has no feed-forward part to replace; pass a workload of gpt_workload")
    layers = tuple(
        replace(blocks[kind], name=layer.name) if kind in blocks else layer
        for kind, layer in zip(workload.kinds, workload.layers, strict=True)
    )
    return replace(workload, name=gpt_name(layers), layers=layers, optimizer=adam_work(layers))


def _with_experts(block: Layer, mixture: Mixture) -> Layer:
    """Return the block with a mixture in place of its last region, the feed-forward part."""
    *kept, dense = block.regions
    h = block.parameter_shapes[0][0]  # of the first norm
    tokens = block.output_bytes // (2 * h)
    rows, count = mixture.rows_per_token, mixture.num_experts
    experts = _experts(dense.forward.times(rows), mixture, round(2 * rows * tokens * h))
    router = Work(2.0 * tokens * h * count, 8.0 * tokens * count + 4 * experts.row_bytes, ROUTER_KERNELS)
    shapes = block.parameter_shapes[:8]  # attention with its norm, and the norm of the mixture
    expert = ((4 * h, h), (4 * h,), (h, 4 * h), (h,))
    all_shapes = (*shapes, (count, h), *expert * count)
    sizes = tuple(math.prod(shape) for shape in all_shapes)
    axes = (*block.parameter_axes[:8], "", *("expert",) * (4 * count))
    inner = round((rows - 1) * 16 * tokens * h) + round(2 * 2 * rows * tokens * h) + 4 * tokens * count
    works = {
        name: getattr(block, name).without(getattr(dense, name)) + getattr(experts, name) + extra
        for name, extra in (
            ("forward", router),
            ("input_gradient", router),
            ("weight_gradient", Work(router.matmul_flops, 0, 1)),
        )
    }
    return replace(
        block,
        **works,
        parameter_sizes=sizes,
        parameter_shapes=all_shapes,
        parameter_axes=axes,
        tensor_parameters=sum(size for size, axis in zip(sizes, axes, strict=True) if axis == "tensor"),
        activation_bytes=block.activation_bytes + inner,
        kept_until_weights_bytes=None,
        tensor_activation_bytes=block.tensor_activation_bytes - 16 * tokens * h,
        regions=tuple(kept),
        experts=experts,
    )


def _experts(work: Work, mixture: Mixture, row_bytes: int) -> Experts:
    count = mixture.num_experts
    forward = replace(work, num_kernels=EXPERT_KERNELS * count)
    weights = Work(work.matmul_flops, 0, EXPERT_KERNELS * count)
    return Experts(count, mixture.top_k, row_bytes, forward, forward, weights, EXPERT_KERNELS)
