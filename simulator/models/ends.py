"""The first and the last layer of a decoder: the embedding of its tokens, and the head with the loss."""

from __future__ import annotations

import math
from typing import Any

from distlab.plan import Layer, Product, Region, Work

LOSS_BYTES = 4  # of one number that ranks sum over a vocabulary that they share
Parts = list[tuple[tuple[int, ...], str]]  # shapes of parameters, and the ranks that divide each


def parameters(parts: Parts) -> dict[str, Any]:
    """Return the fields of a layer that say what parameters it has, from each one's shape and the ranks that cut it."""
    shapes, axes = tuple(shape for shape, _ in parts), tuple(axis for _, axis in parts)
    sizes = tuple(math.prod(shape) for shape in shapes)
    divided = sum(size for size, axis in zip(sizes, axes, strict=True) if axis)
    return {
        "parameter_sizes": sizes,
        "parameter_shapes": shapes,
        "parameter_axes": axes,
        "tensor_parameters": divided,
    }


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
