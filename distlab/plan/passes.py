"""Work: what one pass over a layer asks of a device, in sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from distlab.plan.require import require


@dataclass(frozen=True)
class Work:
    """What one pass over one layer asks of a device.

    Attributes:
        matmul_flops: floating-point operations in matrix products (a multiply-add counts as two).
        memory_bytes: bytes that all other kernels read and write.
        num_kernels: kernels launched.
        attention_flops: floating-point operations in fused attention kernels, which have a rate of their own.
    """

    matmul_flops: float = 0.0
    memory_bytes: float = 0.0
    num_kernels: int = 0
    attention_flops: float = 0.0

    def __post_init__(self) -> None:
        if (
            0 <= self.matmul_flops < math.inf
            and 0 <= self.memory_bytes < math.inf
            and self.num_kernels >= 0
            and 0 <= self.attention_flops < math.inf
        ):
            return  # the usual case, which a sweep meets thousands of times
        for name in ("matmul_flops", "memory_bytes", "num_kernels", "attention_flops"):
            value = getattr(self, name)
            require(value >= 0 and math.isfinite(value), f"Work: {name} is {value!r}; pass a finite number >= 0")

    @property
    def flops(self) -> float:
        """Floating-point operations of matrix products and of fused attention."""
        return self.matmul_flops + self.attention_flops

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matmul_flops + other.matmul_flops,
            self.memory_bytes + other.memory_bytes,
            self.num_kernels + other.num_kernels,
            self.attention_flops + other.attention_flops,
        )

    def without(self, part: Work) -> Work:
        """Return the rest when a part is done elsewhere.

        Raises:
            ValueError: the part is larger in some way; a rounding error of sums is not.
        """
        left = (
            self.matmul_flops - part.matmul_flops,
            self.memory_bytes - part.memory_bytes,
            self.attention_flops - part.attention_flops,
        )
        kernels = self.num_kernels - part.num_kernels
        slack = 1e-9 * max(self.matmul_flops, self.memory_bytes, self.attention_flops, 1.0)
        if min(left) < -slack or kernels < 0:  # the text costs more than the check
            raise ValueError(f"{part} is not a part of {self}; pass at most all of it")
        return Work(max(0.0, left[0]), max(0.0, left[1]), kernels, max(0.0, left[2]))

    def times(self, factor: float) -> Work:
        """Return so many times the products and bytes, in as many kernels: smaller ones, or larger."""
        return Work(
            self.matmul_flops * factor, self.memory_bytes * factor, self.num_kernels, self.attention_flops * factor
        )


class Product(NamedTuple):
    """A matrix product of a forward pass, [rows, depth] x [depth, columns].

    Attributes:
        rows: of the micro-batch: its positions.
        columns: of the output.
        depth: what is summed over.
        divided: the side that tensor-parallel ranks divide: "columns", "depth", or "" for neither.
    """

    rows: int
    columns: int
    depth: int
    divided: str = ""
