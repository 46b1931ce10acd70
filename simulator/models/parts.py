"""What models share: sizes that make sense, parameters and their optimizer, the first and last layer, recompute.

The first layer is the embedding of tokens, the last one the head with the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from distlab.plan import Layer, Product, Region, Work, Workload

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
    return Layer(
        name="head and loss",
        **parameters([*norm, *own]),
        forward=forward,
        input_gradient=forward,
        weight_gradient=weights,
        regions=(
            Region(
                "head",
                forward,
                forward,
                weights,
                2 * tokens * h,
                beside=weights,
                sums_bytes=sums,
                products=(Product(tokens, vocabulary, h, "columns"),),
            ),
        ),
        splits_positions=True,
        sequence_calls=(("all_reduce", h * len(norm)),) if norm else (),
        activation_bytes=4 * tokens * h + 4 * logits,
        logits_bytes=4 * logits,
        output_bytes=0,
    )


def change_layers(workload: Workload, change: Callable[[Layer], Layer | None]) -> tuple[Layer, ...]:
    """Return the layers as `change` makes them, each kind once; those of which it makes None stay as they are."""
    kinds = dict(zip(workload.kinds, workload.layers, strict=True))  # one of those that differ in their name alone
    made = {kind: new for kind, layer in kinds.items() if (new := change(layer)) is not None}
    return tuple(
        replace(made[kind], name=layer.name) if kind in made else layer
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
