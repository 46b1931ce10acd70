"""What stages hand to each other: nested values of tensors, taken apart and put together, or cut into micro-batches.

A message carries tensors and nothing else. So a value is taken apart into its tensors, in order, and a structure that
says where each belongs; the structure and the tensors' kinds make a `ValueLayout`. Ranks tell each other the layouts
once (`distlab.pipeline.negotiate`), and from then on a receiver knows what comes before it is there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorKind(NamedTuple):
    """What a receiver must know of a tensor: its shape, its dtype, and whether a gradient of it is wanted back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}{' (grad)' if self.wants_gradient else ''}"

    def zeros(self, device: torch.device | str) -> Tensor:
        """Make a tensor of this kind, all zero."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


class ValueLayout(NamedTuple):
    """A value without its numbers.

    Attributes:
        structure: JSON text of tuples, lists, dicts and plain values, with places for tensors.
        kinds: of the tensors, in the order of their places.
    """

    structure: str
    kinds: tuple[TensorKind, ...]

    def __str__(self) -> str:
        return _as_text(json.loads(self.structure), self.kinds)

    @property
    def with_gradient(self) -> tuple[TensorKind, ...]:
        """Kinds of the tensors whose gradients travel back."""
        return tuple(kind for kind in self.kinds if kind.wants_gradient)

    def without_gradients(self) -> ValueLayout:
        """Return the same layout for a value that no backward pass reaches."""
        return ValueLayout(self.structure, tuple(kind._replace(wants_gradient=False) for kind in self.kinds))


def take_apart(value: Any) -> tuple[list[Tensor], ValueLayout]:
    """Return a value's tensors, in order, and its layout.

    Tuples, lists and dicts may be nested. They may also hold None, numbers, text and truth values, which become part
    of the layout: they are the same in each micro-batch.

    Raises:
        ValueError: it holds something else.
    """
    tensors: list[Tensor] = []
    structure = json.dumps(_take_out(value, tensors))
    kinds = (TensorKind(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors)
    return tensors, ValueLayout(structure, tuple(kinds))


def put_together(layout: ValueLayout, tensors: Sequence[Tensor]) -> Any:
    """Undo `take_apart`."""
    return _put_back(json.loads(layout.structure), tensors)


def _take_out(value: Any, tensors: list[Tensor]) -> Any:
    """Return a tree that JSON holds: ["t", place], ["v", plain value], [kind of container, its contents]."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["t", len(tensors) - 1]
    if value is None or isinstance(value, bool | int | float | str):
        return ["v", value]
    if type(value) in (tuple, list):
        return [type(value).__name__, [_take_out(inner, tensors) for inner in value]]
    if type(value) is dict and all(isinstance(key, str | int) for key in value):
        return ["dict", [[key, _take_out(inner, tensors)] for key, inner in value.items()]]
    raise ValueError(
        f"stages hand over tensors in tuples, lists and dicts (keys: text or whole numbers), got a "
        f"{type(value).__name__}; return one of these"
    )


def _put_back(tree: Any, tensors: Sequence[Tensor]) -> Any:
    kind, inner = tree
    if kind == "t":
        return tensors[inner]
    if kind == "v":
        return inner
    if kind == "dict":
        return {key: _put_back(value, tensors) for key, value in inner}
    values = [_put_back(value, tensors) for value in inner]
    return tuple(values) if kind == "tuple" else values


def _as_text(tree: Any, kinds: Sequence[TensorKind]) -> str:
    kind, inner = tree
    if kind == "t":
        return str(kinds[inner])
    if kind == "v":
        return repr(inner)
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_as_text(value, kinds)}" for key, value in inner) + "}"
    texts = ", ".join(_as_text(value, kinds) for value in inner)
    return f"({texts})" if kind == "tuple" else f"[{texts}]"


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
