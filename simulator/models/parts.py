"""What models share: sizes, parameters and their optimizer, the first and last layer, recompute, mixtures of experts.

The first layer is the embedding of tokens, the last one the head with the loss. In a mixture a router sends each token
to the top k of E feed-forward parts with parameters of their own. Experts are whole wherever they are: tensor-parallel
ranks do not divide them. A part that every token passes (a shared expert) stays a region of the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from distlab.plan import Experts, Layer, Product, Region, Work, Workload
from distlab.plan.require import changed

PASSES = ("forward", "input_gradient", "weight_gradient")
ADAM_BYTES = 28  # read gradient, parameter and two moments in fp32, write all but the gradient
LOSS_BYTES = 4  # of one number that ranks sum over a vocabulary that they share
Parts = list[tuple[tuple[int, ...], str]]  # shapes of parameters, and the ranks that divide each
Shapes = tuple[tuple[int, ...], ...]
# Larger sizes are slips of the hand.
MOST = 10**9
MOST_OF = {"num_layers": 10_000, "num_experts": 10_000}  # each is a record of its own: more of them take minutes


def require_sizes(owner: str, **values: int | None) -> None:
    """Refuse a size that is less than 1, or larger than any model's; None was not given.

    Raises:
        ValueError: which one, and what to pass.
    """
    for name, value in values.items():
        most = MOST_OF.get(name, MOST)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{owner}: {name} is {value!r}; pass a whole number of at least 1")
        if value > most:
            raise ValueError(f"{owner}: {name} is {shown(value)}; pass at most {most:,}")


def shown(value: int) -> str:
    """Write a number that may have hundreds of digits."""
    return f"{value:,}" if value < 10**15 else f"a number of {len(str(value))} digits"


def parameters(parts: Parts) -> dict[str, Any]:
    """Return the fields of a layer that say what parameters it has, from each one's shape and the ranks that cut it."""
    shapes, axes = tuple(shape for shape, _ in parts), tuple(axis for _, axis in parts)
    sizes = tuple(math.prod(shape) for shape in shapes)
    divided = sum(size for size, axis in zip(sizes, axes, strict=True) if axis == "tensor")
    return {"parameter_sizes": sizes, "parameter_shapes": shapes, "parameter_axes": axes, "tensor_parameters": divided}


def adam_work(layers: Sequence[Layer]) -> Work:
    """Return the work of one update of all parameters, a kernel a tensor."""
    tensors = sum(len(layer.parameter_sizes) for layer in layers)
    return Work(memory_bytes=ADAM_BYTES * sum(layer.num_parameters for layer in layers), num_kernels=tensors)


def tokens_of(workload: Workload) -> int:
    """Return the tokens of a sample: the positions of its sequence; 1 where the model has no attention."""
    found = (region.attention for layer in workload.layers for region in layer.regions)
    return next((attention.num_positions for attention in found if attention), 1)


def trained_by_adam(name: str, layers: tuple[Layer, ...], samples: int, bytes_per_parameter: int) -> Workload:
    """Return a model of 16-bit activations that Adam trains; with 16-bit parameters it keeps a master copy."""
    return Workload(
        name=name,
        layers=layers,
        bytes_per_parameter=bytes_per_parameter,
        optimizer=adam_work(layers),
        optimizer_bytes_per_parameter=8,
        samples=samples,
        master_bytes_per_parameter=4 if bytes_per_parameter == 2 else 0,
        activation_element_bytes=2,
    )


def embedding_layer(sizes: tuple[int, int, int], num_positions: int) -> Layer:
    """Return the embedding of tokens, a vocabulary and a hidden size, with positions that are learned, or none."""
    tokens, vocabulary, h = sizes
    output, learned = tokens * h * 2, num_positions * h
    own: Parts = [((vocabulary, h), "tensor"), ((num_positions, h), "")]
    return Layer(
        name="embedding",
        **parameters(own if learned else own[:1]),
        forward=Work(memory_bytes=2 * output, num_kernels=1),
        input_gradient=Work(),
        weight_gradient=Work(memory_bytes=2 * output, num_kernels=1),
        activation_bytes=tokens * 8,  # token numbers
        output_bytes=output,
        regions=(Region("embedding", output_bytes=output),),
        splits_positions=True,
        sequence_calls=(("all_gather", learned),) if learned else (),
    )


def head_layer(
    sizes: tuple[int, int, int], norm_parameters: int | None, *, is_tied: bool = True, has_bias: bool = False
) -> Layer:
    """Return the last norm (None: there is none), the head and the loss: of tokens, a vocabulary and a hidden size."""
    tokens, vocabulary, h = sizes
    flops, logits = 2.0 * tokens * h * vocabulary, tokens * vocabulary
    forward, weights = Work(flops, 8 * logits, 3 if norm_parameters is None else 4), Work(flops, 0, 1)
    sums = (LOSS_BYTES * tokens, 2 * LOSS_BYTES * tokens)
    norm: Parts = [((h,), "")] * (norm_parameters or 0)
    own: Parts = [] if is_tied else [((vocabulary, h), "tensor")]
    own += [((vocabulary,), "tensor")] if has_bias else []
    region = Region("head", forward, forward, weights, 2 * tokens * h)
    products = (Product(tokens, vocabulary, h, "columns"),)
    return Layer(
        name="head and loss",
        **parameters([*norm, *own]),
        forward=forward,
        input_gradient=forward,
        weight_gradient=weights,
        regions=(replace(region, beside=weights, sums_bytes=sums, products=products),),
        splits_positions=True,
        sequence_calls=(("all_reduce", h * len(norm)),) if norm else (),
        activation_bytes=4 * tokens * h + 4 * logits,
        logits_bytes=4 * logits,
        output_bytes=0,
    )


def chunk_loss(workload: Workload, count: int) -> Workload:
    """Return the workload with a loss that makes logits of so many parts of the positions, one after the other.

    Forward and backward of a part run at once, so that one part's logits are there at a time; kernels are as many more.

    Source: linkedin/Liger-Kernel, fused_linear_cross_entropy.py, 2024.
    """
    head = workload.layers[-1]
    dropped, more = head.logits_bytes * (count - 1) // count, Work(num_kernels=(count - 1) * head.forward.num_kernels)
    changes: dict[str, Any] = {name: getattr(head, name) + more for name in PASSES[:2]}
    changes |= {name: getattr(head, name) - dropped for name in ("logits_bytes", "activation_bytes")}
    return replace(workload, layers=(*workload.layers[:-1], replace(head, **changes)))


def change_layers(workload: Workload, change: Callable[[Layer], Layer | None]) -> tuple[Layer, ...]:
    """Return the layers as `change` makes them, each kind once; those of which it makes None stay as they are."""
    kinds = dict(zip(workload.kinds, workload.layers, strict=True))  # one of those that differ in their name alone
    made = {kind: new for kind, layer in kinds.items() if (new := change(layer)) is not None}
    return tuple(
        changed(made[kind], name=layer.name) if kind in made else layer
        for kind, layer in zip(workload.kinds, workload.layers, strict=True)
    )


def with_operators(region: Region, products: Shapes, tokens: int, *, first: int = 0, is_last: bool = False) -> Region:
    """Return the region under per-operator recompute: the bytes that it keeps, and the work that runs again.

    Products are counted through a block from 0. Outputs of those with an even number are kept, in 16 bits. The last one
    of a block does not run again either, since backward does not need its output.

    Args:
        region: with plain attention, if any: `fuse_attention` keeps the output of a fused one.
        products: shapes of its matrices, columns of the output first, in the order in which they run.
        tokens: of a micro-batch.
        first: number of its first product in the block.
        is_last: whether its last product is the block's.

    Source: pytorch/torchtitan, activation_checkpoint.py, 2024: every second `aten.mm` of a block is computed again.
    """
    kept = [shape for number, shape in enumerate(products, first) if number % 2 == 0]
    left_out = kept if (first + len(products)) % 2 or not is_last else [*kept, products[-1]]
    flops = 2.0 * tokens * sum(columns * depth for columns, depth in left_out)
    again = region.forward.without(Work(flops, 0, min(len(left_out), region.forward.num_kernels)))
    return replace(region, again=again, kept_bytes=2 * tokens * sum(columns for columns, _ in kept))


ROUTER_KERNELS = 8  # the product, softmax, top k, the orderings, and what adds rows up
# How often all rows are read and written: by rank before they leave, by expert where they arrive, and back.
# Source: NVIDIA/Megatron-LM, token_dispatcher.py, MoEAlltoAllTokenDispatcher, 2024.
ORDERINGS = 4
# Of an element of the rows that experts return, in 16 bits: a product and a sum in 32 bits, one tensor of all, 16 bits;
# back through each, with sums over rows and over columns. An expert's nine kernels are counted alike in three passes.
# Source: NVIDIA/Megatron-LM, megatron/core/transformer/moe/experts.py, TEGroupedMLP._apply_bias, 2025.
BIAS_BYTES, BIAS_KERNELS = (28, 40), 3


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
        has_biases: experts have biases (GPT-OSS), which are added expert by expert, times a row's weight.
    """

    num_experts: int
    top_k: int = 1
    expert_size: int | None = None
    shared_size: int = 0
    dense_layers: int = 0
    every: int = 1
    router_bias: bool = False
    most_groups: tuple[int, int] | None = None
    has_biases: bool = False

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
    added = (Work(memory_bytes=size * rows * tokens * h * mixture.has_biases) for size in BIAS_BYTES)
    extra = (*(router + work for work in added), Work(router.matmul_flops, 0, 1))
    works = {
        name: getattr(block, name) + getattr(experts, name) + work for name, work in zip(PASSES, extra, strict=True)
    }
    return replace(block, **works, **parameters(parts), activation_bytes=block.activation_bytes + kept, experts=experts)


def load_experts(workload: Workload, load: float) -> Workload:
    """Return the workload whose experts have `load` times the rows of an even load, as those of the fullest rank have.

    So many times the rows travel, are ordered, computed and kept; utilization (MFU) counts the even ones.

    Raises:
        ValueError: the workload has no experts.
    """

    def loaded(layer: Layer) -> Layer | None:
        even, works = layer.experts, {}
        if even is None:
            return None
        grown: dict[str, Any] = {name: getattr(even, name).times(load) for name in PASSES}
        grown["products"] = tuple(part._replace(rows=math.ceil(part.rows * load)) for part in even.products)
        own = replace(even, row_bytes=round(even.row_bytes * load), **grown)
        for name in PASSES:
            ordered = Work(memory_bytes=2.0 * ORDERINGS * even.row_bytes * (name != PASSES[2]))
            rest = getattr(layer, name).without(getattr(even, name) + ordered)
            works[name] = rest + getattr(own, name) + ordered.times(load)
        kept = layer.activation_bytes + round((load - 1) * (even.forward.memory_bytes / 2 + 2 * even.row_bytes))
        uncounted = layer.uncounted_flops + (load - 1) * sum(getattr(even, name).flops for name in PASSES)
        return replace(layer, **works, experts=own, activation_bytes=kept, uncounted_flops=uncounted)

    if not any(layer.experts for layer in workload.layers):
        raise ValueError(f"{workload.name} has no experts, whose load is given; leave it out, or choose a mixture")
    return replace(workload, layers=change_layers(workload, loaded))


def _experts(expert: Region, mixture: Mixture, row_bytes: int) -> Experts:
    count, rows = mixture.num_experts, float(mixture.top_k)
    kernels = expert.forward.num_kernels + BIAS_KERNELS * mixture.has_biases
    forward = replace(expert.forward.times(rows), num_kernels=kernels * count)
    weights = Work(forward.matmul_flops, 0, kernels * count)
    each = tuple(part._replace(rows=math.ceil(part.rows * rows / count), divided="") for part in expert.products)
    sizes = (count, mixture.top_k, row_bytes)
    return Experts(*sizes, forward, forward, weights, kernels, products=each, most_groups=mixture.most_groups)
