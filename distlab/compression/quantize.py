"""Send fewer bits of every element: each block of 1,024 elements is cut into equal steps, and a step's number is sent.

With `bits` bits a block has 2**bits levels from its lowest value to its highest. A block's own range matters: one large
element in a vector of a million would otherwise leave a single level for all others. Rounding to the nearest level is
off by half a step at most, but always the same way for the same value; stochastic rounding is off by up to a step, and
right on average, so errors of many ranks and steps cancel.

Codes of different ranks must never be added: their steps differ, and a byte overflows. Every rank decodes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.compression.bits import pack_bits, unpack_bits
from distlab.plan.compression import BLOCK, checked, packed_bytes

CHUNK = 64 * BLOCK  # elements worked on at a time: they stay in the cache from one operation to the next
STEP_MARGIN = 2.0**-20  # steps are wider by this, so that rounding up never leads beyond the last code


class Quantized(NamedTuple):
    """A vector in few bits.

    Attributes:
        lows: [blocks] value of code 0 in each block.
        steps: [blocks] what one more in the code adds; 0 where all elements of the block are equal.
        packed: [ceil(E bits / 8)] uint8, the codes end to end.
        bits: of a code.
        size: E, the number of elements.
    """

    lows: Tensor
    steps: Tensor
    packed: Tensor
    bits: int
    size: int


def quantize(vector: Tensor, bits: int, generator: torch.Generator | None = None) -> Quantized:
    """Cut each block into 2**bits levels and number every element's.

    Args:
        vector: [E], of float32 or float64.
        bits: of a code, 1 to 8.
        generator: rounds up or down by chance, so that the mean is right; None rounds to the nearest level.

    Cost: ceil(E bits / 8) bytes of codes and two numbers per block.
    Error: at most half a step to the nearest level, less than one by chance; a step is (highest - lowest) /
        (2**bits - 1). A block of equal elements is exact. NaN or inf, or a range that overflows, makes the block's
        step NaN or inf.

    Raises:
        ValueError: bits outside 1 to 8, or a vector that is not flat.

    Source: Alistarh et al. 2017, QSGD, section 3; there levels divide the length of the vector, here the range of a
        block.
    """
    checked("bits", bits)
    check_vector(vector)
    lows = per_block(vector, lambda part: part.amin(dim=1))
    highs = per_block(vector, lambda part: part.amax(dim=1))
    steps = (highs - lows) / (2**bits - 1) * (1 + STEP_MARGIN)
    steps[steps < torch.finfo(vector.dtype).tiny] = 0  # a step whose inverse overflows: the block counts as equal
    inverse = torch.where(steps > 0, 1 / steps, 0)
    parts = []
    for part, blocks in chunks(vector):
        scaled = part - lows[blocks, None]
        scaled *= inverse[blocks, None]
        if generator is None:
            scaled += 0.5
        else:
            scaled += torch.rand(scaled.shape, generator=generator, dtype=scaled.dtype, device=scaled.device)
        parts.append(pack_bits(scaled.to(torch.uint8).view(-1), bits))  # rounds down
    return Quantized(lows, steps, torch.cat(parts), bits, vector.numel())


def dequantize(quantized: Quantized) -> Tensor:
    """Return each code's level: low + code * step.

    Shapes: -> [E], of the dtype of the steps
    """
    return torch.cat(list(levels(quantized)))


def levels(quantized: Quantized) -> Iterator[Tensor]:
    """Yield the levels of some blocks at a time, those of each of `block_ranges`."""
    lows, steps, packed, bits, size = quantized
    for elements in block_ranges(size):
        begin, number = elements.start, elements.stop - elements.start
        at = begin * bits // 8  # a whole byte: a block's codes fill bytes
        codes = unpack_bits(packed[at : at + packed_bytes(number, bits)], bits, number)
        blocks = slice(begin // BLOCK, -(-elements.stop // BLOCK))
        part = codes.to(steps.dtype).view(blocks.stop - blocks.start, -1)
        part *= steps[blocks, None]
        part += lows[blocks, None]
        yield part.view(-1)


def two_means(vector: Tensor) -> Quantized:
    """Cut each block in the middle of its range, and send one bit and the means of both sides.

    The levels of `quantize` are the ends of the range. With one bit that puts most elements far from either, farther
    than from zero, and a memory of such errors would grow without bound. Means are the best two levels for a cut.

    Shapes: vector [E] -> E bits, and two numbers per block
    Error: never more than the block's own length: |x - result| <= |x|.

    Raises:
        ValueError: the vector is not flat.

    Source: Seide et al. 2014, 1-Bit Stochastic Gradient Descent, section 3. There the cut is at zero, and a block
        is a column.
    """
    check_vector(vector)
    middles = per_block(vector, lambda part: part.amin(dim=1) / 2 + part.amax(dim=1) / 2)
    parts, lows, highs = [], [], []
    for part, blocks in chunks(vector):
        above = part > middles[blocks, None]
        parts.append(pack_bits(above.view(-1).view(torch.uint8), 1))
        above_or_zero = above.to(part.dtype)
        num_above = above_or_zero.sum(dim=1)
        above_or_zero *= part
        highs.append(above_or_zero.sum(dim=1) / num_above.clamp(min=1))
        below_or_zero = torch.sub(part, above_or_zero, out=above_or_zero)
        lows.append(below_or_zero.sum(dim=1) / (part.shape[1] - num_above).clamp(min=1))
    low, high = torch.cat(lows), torch.cat(highs)
    steps = torch.where(high > low, high - low, (high - low) * 0)  # without an element above, zero; NaN stays NaN
    return Quantized(low, steps, torch.cat(parts), 1, vector.numel())


def sign(vector: Tensor) -> Quantized:
    """Keep the sign of each element, and the mean size of each block.

    It is a quantization to one bit whose two levels are -scale and +scale.

    Shapes: vector [E] -> E bits, and one number per block (lows; steps follow from it)

    Raises:
        ValueError: the vector is not flat.

    Source: Karimireddy et al. 2019, Error Feedback Fixes SignSGD, algorithm 2; there one scale per
        layer, here one per block.
    """
    check_vector(vector)
    scales = per_block(vector, lambda part: torch.linalg.vector_norm(part, ord=1, dim=1) / part.shape[1])
    packed = torch.cat([pack_bits((part >= 0).view(-1).view(torch.uint8), 1) for part, _ in chunks(vector)])
    return from_signs(scales, packed, vector.numel())


def from_signs(scales: Tensor, packed: Tensor, size: int) -> Quantized:
    """Rebuild the result of `sign` from the scales and bits that were sent: bit 0 is -scale, bit 1 is +scale."""
    return Quantized(-scales, 2 * scales, packed, 1, size)


def per_block(vector: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce each block to a number; the last block may be shorter.

    Shapes: vector [E]; reduce [blocks, elements] -> [blocks] -> [ceil(E / 1024)]
    """
    whole = vector.numel() // BLOCK * BLOCK
    parts = [vector[:whole].view(-1, BLOCK)] if whole else []
    parts += [vector[whole:].view(1, -1)] if whole < vector.numel() else []
    return torch.cat([reduce(part) for part in parts])


def block_ranges(size: int) -> Iterator[slice]:
    """Yield the elements of some whole blocks at a time; a shorter last block comes alone."""
    whole = size // BLOCK * BLOCK
    for begin in range(0, whole, CHUNK):
        yield slice(begin, min(begin + CHUNK, whole))
    if whole < size:
        yield slice(whole, size)


def chunks(vector: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Yield some blocks at a time, as rows of a view, and which blocks they are."""
    for elements in block_ranges(vector.numel()):
        blocks = slice(elements.start // BLOCK, -(-elements.stop // BLOCK))
        yield vector[elements].view(blocks.stop - blocks.start, -1), blocks


def check_vector(vector: Tensor) -> None:
    """Refuse what is not a flat vector of float32 or float64.

    Raises:
        ValueError: it is not.
    """
    if vector.dim() != 1 or vector.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"the vector has shape {list(vector.shape)} and dtype {str(vector.dtype).removeprefix('torch.')}; "
            "pass one dimension of float32 or float64, such as gradient.view(-1).float()"
        )
