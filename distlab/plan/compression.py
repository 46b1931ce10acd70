"""Compression: how much smaller a bucket's gradients are made, and what that leaves to send.

Bytes on the wire follow from shapes alone, so they are known before anything runs: `exchanges` lists the calls that
one bucket costs each rank. Symbols: E elements of b bytes each, k elements kept, blocks of 1,024 elements with scales
of s = max(b, 4) bytes.

    top_k      one all_gather of k (b + 4)                        a value and a 32-bit index for each
    random_k   one all_reduce of k b                              every rank draws the same indices: none are sent
    quantize   one all_gather of ceil(E bits / 8) + 2 s blocks    codes, and each block's lowest value and step
    sign       one all_gather of ceil(E / 8) + s blocks           one bit per element, and each block's scale
    powersgd   one all_reduce of w b + all n r b, one of all m r b     factors of [n, m] matrices; w elements go whole

An all_reduce moves the same bytes to and from a rank however many ranks there are; an all_gather hands every rank's
payload to every other, so its cost grows with their number. That, and not the ratio alone, decides when it pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distlab.plan.require import chosen, require

METHODS = ("top_k", "random_k", "quantize", "sign", "powersgd")
BLOCK = 1024  # elements that share a scale
INDEX_BYTES = 4
MAX_BITS = 8


@dataclass(frozen=True)
class Compression:
    """What stands between a bucket of gradients and the wire.

    Attributes:
        method: one of METHODS.
        ratio: share of the elements that top_k and random_k send.
        bits: of a code of quantize.
        rank: of powersgd's factors.
        error_feedback: add what was not sent to the next step's gradients.
        stochastic: quantize rounds up or down by chance, so that the mean is right.
        min_saving: powersgd leaves a matrix as it is unless its factors are smaller by more than this.

    Raises:
        ValueError: an unknown method, a ratio outside (0, 1], bits outside 1 to 8, a rank below 1.
    """

    method: str
    ratio: float = 0.01
    bits: int = 8
    rank: int = 4
    error_feedback: bool = True
    stochastic: bool = False
    min_saving: float = 2.0

    def __post_init__(self) -> None:
        chosen("method", self.method, METHODS)
        for name in ("ratio", "bits", "rank", "min_saving"):
            checked(name, getattr(self, name))


class Exchange(NamedTuple):
    """One call of torch.distributed.

    Attributes:
        kind: "all_reduce" or "all_gather".
        num_bytes: what this rank hands to the call.
    """

    kind: str
    num_bytes: int


def exchanges(
    compression: Compression, shapes: Sequence[Sequence[int]], bytes_per_element: int = 4
) -> tuple[Exchange, ...]:
    """Return the calls that one bucket costs each rank in a step, in order.

    Args:
        compression: what is done to the bucket.
        shapes: of the bucket's tensors.
        bytes_per_element: of the gradients: 4 in float32.

    Raises:
        ValueError: no elements, or elements of less than one byte.
    """
    size = sum(math.prod(shape) for shape in shapes)
    require(size >= 1, f"a bucket of shapes {[tuple(shape) for shape in shapes]} holds nothing; pass its tensors'")
    require(bytes_per_element >= 1, f"bytes_per_element is {bytes_per_element}; pass at least 1, such as 4 for float32")
    num_blocks, scale_bytes = -(-size // BLOCK), max(bytes_per_element, 4)
    if compression.method == "top_k":
        return (Exchange("all_gather", num_kept(size, compression.ratio) * (bytes_per_element + INDEX_BYTES)),)
    if compression.method == "random_k":
        return (Exchange("all_reduce", num_kept(size, compression.ratio) * bytes_per_element),)
    if compression.method == "quantize":
        return (Exchange("all_gather", packed_bytes(size, compression.bits) + 2 * num_blocks * scale_bytes),)
    if compression.method == "sign":
        return (Exchange("all_gather", packed_bytes(size, 1) + num_blocks * scale_bytes),)
    return _powersgd(compression, shapes, bytes_per_element)


def _powersgd(
    compression: Compression, shapes: Sequence[Sequence[int]], bytes_per_element: int
) -> tuple[Exchange, ...]:
    """What goes whole and all left factors together, then all right factors, which are made from the first answer."""
    first = second = 0
    for shape in shapes:
        num_rows, num_columns = as_matrix(shape)
        if worth_factoring((num_rows, num_columns), compression.rank, compression.min_saving):
            rank = min(compression.rank, num_rows, num_columns)
            first += num_rows * rank
            second += num_columns * rank
        else:
            first += math.prod(shape)
    return tuple(Exchange("all_reduce", number * bytes_per_element) for number in (first, second) if number)


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a tensor seen as a matrix: its first dimension by all others."""
    num_rows = shape[0] if shape else 1
    return num_rows, math.prod(shape[1:])


def worth_factoring(matrix: tuple[int, int], rank: int, min_saving: float = 2.0) -> bool:
    """Tell whether factors of this rank are smaller than the matrix by more than `min_saving`."""
    num_rows, num_columns = matrix
    return (num_rows + num_columns) * min(rank, num_rows, num_columns) * min_saving < num_rows * num_columns


def num_kept(size: int, ratio: float) -> int:
    """Return how many of `size` elements a ratio keeps: never none, since a bucket must not go silent."""
    return max(1, round(ratio * size))


def packed_bytes(size: int, bits: int) -> int:
    """Return the bytes of `size` codes laid end to end, bit by bit."""
    return -(-size * bits // 8)


def checked(name: str, value: Any) -> Any:
    """Return the value of an option of a compression: "ratio", "bits", "rank" or "min_saving".

    Raises:
        ValueError: a ratio outside (0, 1], bits outside 1 to 8, a rank below 1, a saving of 0 or less.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = whole or isinstance(value, float)
    right, wanted = {
        "ratio": (number and 0 < value <= 1, "the share of elements to send, above 0 and at most 1, such as 0.01"),
        "bits": (whole and 1 <= value <= MAX_BITS, f"the bits of a code, a whole number from 1 to {MAX_BITS}"),
        "rank": (whole and value >= 1, "the rank of the factors, a whole number of at least 1, such as 4"),
        "min_saving": (number and 0 < value < math.inf, "a number above 0, such as 2.0"),
    }[name]
    require(right, f"{name} is {value!r}; pass {wanted}")
    return value
