"""A batch, cut into micro-batches; what is wrong with it is said before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.pipeline.agreement.shapes import ValueLayout, put_together, take_apart


class Batch(NamedTuple):
    """What this rank was given for a step, cut into micro-batches.

    Attributes:
        inputs: of stage 0, one value per micro-batch; empty on ranks without stage 0.
        targets: what the loss compares the last stage's output to; empty without a loss.
        layout: of one micro-batch of inputs.
        sizes: samples of inputs and of targets, as far as they are here.
    """

    inputs: Sequence[Any] = ()
    targets: Sequence[Any] = ()
    layout: ValueLayout | None = None
    sizes: dict[str, int] = {}  # never written to


def cut_batch(inputs: Any, targets: Any, num_microbatches: int) -> Batch:
    """Cut a rank's inputs and targets into micro-batches; None: this rank does not need them.

    Raises:
        ValueError: it cannot be cut into equal micro-batches.
    """
    parts, sizes = {}, {}
    for name, value in (("inputs", inputs), ("targets", targets)):
        parts[name] = [] if value is None else cut(value, num_microbatches)
        if value is not None:
            sizes[name] = num_samples(take_apart(value)[0])
    layout = take_apart(parts["inputs"][0])[1].without_gradients() if parts["inputs"] else None
    return Batch(parts["inputs"], parts["targets"], layout, sizes)


def cut(value: Any, num_parts: int) -> list[Any]:
    """Cut every tensor of a value into equal parts along its first dimension: one value per part.

    Shapes: [m B, ...] -> m values of [B, ...]

    Raises:
        ValueError: no tensor, tensors without or with different first dimensions, or one that the parts do not divide;
            the text names numbers that do.
    """
    tensors, layout = take_apart(value)
    size = num_samples(tensors)
    if size < num_parts:
        raise ValueError(
            f"a batch of {size} cannot fill {num_parts} micro-batches; pass a batch of {num_parts} or more, or plan "
            f"at most {size} micro-batches"
        )
    if size % num_parts:
        fit = [number for number in range(1, size + 1) if size % number == 0]
        near = sorted(fit, key=lambda number: abs(number - num_parts))[:4]
        raise ValueError(
            f"{num_parts} micro-batches do not divide a batch of {size}; plan {', '.join(map(str, sorted(near)))} "
            f"micro-batches, or pass a batch of {size - size % num_parts} or {size + num_parts - size % num_parts}"
        )
    parts = zip(*(tensor.split(size // num_parts) for tensor in tensors), strict=True)
    return [put_together(layout, part) for part in parts]


def join(values: Sequence[Any]) -> Any:
    """Undo `cut`: concatenate the values of all micro-batches; stack those without dimensions.

    Shapes: m values of [B, ...] -> [m B, ...]; m values of [] -> [m]
    """
    apart = [take_apart(value) for value in values]
    joined = [
        torch.cat(same) if same[0].dim() else torch.stack(same)
        for same in zip(*(tensors for tensors, _ in apart), strict=True)
    ]
    return put_together(apart[0][1], joined)


def num_samples(tensors: Sequence[Tensor]) -> int:
    """Return the length of the first dimension, which all tensors of a batch share.

    Raises:
        ValueError: no tensor, one without dimensions, or different lengths.
    """
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if len(sizes) != 1 or None in sizes:
        shapes = [list(tensor.shape) for tensor in tensors]
        raise ValueError(
            f"a batch is cut along dimension 0, but its tensors have the shapes {shapes}; pass tensors whose first "
            "dimension is the batch"
        )
    return int(sizes.pop() or 0)
