"""Codecs: a vector to bytes that one all-gather carries, and back.

What travels is one tensor of bytes whose length follows from the vector's size alone, so that it is the same on every
rank. A codec never hides NaN or inf: what it makes of them is itself not finite, and every rank sees it on arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from distlab.compression.quantize import Quantized, block_ranges, from_signs, levels, quantize, sign, two_means
from distlab.compression.sparse import top_k
from distlab.plan.compression import INDEX_BYTES, num_kept, packed_bytes


class Sparse(NamedTuple):
    """A vector that is zero except for some elements."""

    indices: Tensor
    values: Tensor


class Codec(Protocol):
    """One way to make a vector small. The dtype is that of the gradients; vectors are float32 or float64."""

    @property
    def description(self) -> str:
        """What ranks must agree on."""

    def encode(self, vector: Tensor, dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
        """Return the bytes: [E] -> [B] uint8."""

    def open(self, payload: Tensor, size: int, dtype: torch.dtype) -> Sparse | Quantized:
        """Find in the bytes what `average_` works on; cheap."""


class TopKCodec(NamedTuple):
    """Top-k as one message: the values that are kept, of b bytes each, then their indices in 32 bits."""

    ratio: float

    @property
    def description(self) -> str:
        """What ranks must agree on."""
        return f"top_k of ratio {self.ratio}"

    def encode(self, vector: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None) -> Tensor:
        """Write the k largest of E values into one message, [E] -> [k (b + 4)] uint8."""
        indices, values = top_k(vector, num_kept(vector.numel(), self.ratio))
        return _join(values.to(dtype), indices.to(torch.int32))

    def open(self, payload: Tensor, size: int, dtype: torch.dtype) -> Sparse:
        """Return indices and values."""
        values, indices = _split(payload, dtype, INDEX_BYTES * num_kept(size, self.ratio))
        return Sparse(indices.clone().view(torch.int32).to(torch.int64), values.to(_wide(dtype)))


class QuantizeCodec(NamedTuple):
    """Lowest values, then steps, then codes."""

    bits: int

    @property
    def description(self) -> str:
        """What ranks must agree on."""
        return f"quantize to {self.bits} bits"

    def encode(self, vector: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None) -> Tensor:
        """[E] -> [2 s blocks + ceil(E bits / 8)] uint8."""
        if self.bits == 1 and generator is None:
            quantized = two_means(vector)  # the ends of the range would be worse than nothing
        else:
            quantized = quantize(vector, self.bits, generator)
        return _join(quantized.lows, quantized.steps, quantized.packed)

    def open(self, payload: Tensor, size: int, dtype: torch.dtype) -> Quantized:
        """Return lowest values, steps and codes."""
        scales, packed = _split(payload, _wide(dtype), packed_bytes(size, self.bits))
        lows, steps = scales.view(2, -1)
        return Quantized(lows, steps, packed, self.bits, size)


class SignCodec:
    """One scale per block, then one sign bit per element."""

    description = "sign"

    def encode(self, vector: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None) -> Tensor:
        """[E] -> [s blocks + ceil(E / 8)] uint8."""
        signs = sign(vector)
        return _join(-signs.lows, signs.packed)

    def open(self, payload: Tensor, size: int, dtype: torch.dtype) -> Quantized:
        """Return scales and bits as a quantization to one bit."""
        scales, packed = _split(payload, _wide(dtype), packed_bytes(size, 1))
        return from_signs(scales, packed, size)


def is_finite(opened: Sparse | Quantized) -> bool:
    """Tell whether the vector that was encoded held neither NaN nor inf."""
    telling = opened.values if isinstance(opened, Sparse) else opened.steps
    return bool(telling.isfinite().all())


def average_(vector: Tensor, opened: Sequence[Sparse | Quantized], rank: int, memory: Tensor | None) -> None:
    """Write the mean of all ranks' parts into the vector, and into the memory the part that `rank` did not send.

    Parts are added in the order of ranks, the same on all ranks: a sum of floats depends on it.

    Shapes: vector [E], memory [E] or None, in place
    """
    weight = 1 / len(opened)
    sparse = [one for one in opened if isinstance(one, Sparse)]
    if sparse:
        if memory is not None:
            memory.copy_(vector)
            memory.index_add_(0, sparse[rank].indices, sparse[rank].values, alpha=-1)
        vector.zero_()
        for indices, values in sparse:
            vector.index_add_(0, indices, values, alpha=weight)
        return
    dense = [one for one in opened if isinstance(one, Quantized)]
    for blocks, *parts in zip(block_ranges(vector.numel()), *map(levels, dense), strict=True):
        total = vector[blocks]
        if memory is not None:
            torch.sub(total, parts[rank], out=memory[blocks])
        total.zero_()
        for part in parts:
            total.add_(part, alpha=weight)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of a type are compressed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _join(*parts: Tensor) -> Tensor:
    return torch.cat([part.view(torch.uint8) for part in parts])


def _split(payload: Tensor, dtype: torch.dtype, num_last: int) -> tuple[Tensor, Tensor]:
    """Return numbers of a dtype, and the last bytes as they are.

    The numbers are copied: payloads of several ranks lie end to end, where a number may begin at any byte.
    """
    first = payload.numel() - num_last
    return payload[:first].clone().view(dtype), payload[first:]
