"""Where the matrices of a bucket lie, and where their factors lie in PowerSGD's messages.

Matrices of one shape that lie at even distances (a layer repeated is just that) make a batch: one view [count, n, m] of
the bucket, multiplied by one call, and nothing is copied together first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from distlab.blocks.gradient_hook import GradientBucket
from distlab.plan.compression import as_matrix, worth_factoring


class MatrixBatch(NamedTuple):
    """Equal matrices at even distances.

    Attributes:
        rows: n.
        columns: m.
        rank: r, columns of each factor.
        num_matrices: matrices in the batch.
        offset: of the first matrix in the bucket.
        distance: from one matrix to the next, in elements.
        left_at: where the left factors begin among all left factors.
        right_at: where the right factors begin among all right factors.
    """

    rows: int
    columns: int
    rank: int
    num_matrices: int
    offset: int
    distance: int
    left_at: int
    right_at: int

    @property
    def left_end(self) -> int:
        """Where the left factors end."""
        return self.left_at + self.num_matrices * self.rows * self.rank

    @property
    def right_end(self) -> int:
        """Where the right factors end."""
        return self.right_at + self.num_matrices * self.columns * self.rank

    def matrices(self, buffer: Tensor) -> Tensor:
        """See the matrices in a buffer of the bucket's size: [count, n, m], a view."""
        shape, strides = (self.num_matrices, self.rows, self.columns), (self.distance, self.columns, 1)
        return buffer.as_strided(shape, strides, buffer.storage_offset() + self.offset)

    def left(self, factors: Tensor) -> Tensor:
        """See the left factors among all left factors: [count, n, r], a view."""
        return factors[self.left_at : self.left_end].view(self.num_matrices, self.rows, self.rank)

    def right(self, factors: Tensor) -> Tensor:
        """See the right factors among all right factors: [count, m, r], a view."""
        return factors[self.right_at : self.right_end].view(self.num_matrices, self.columns, self.rank)


class FactorLayout:
    """How PowerSGD cuts up one bucket.

    Attributes:
        shapes: of the bucket's gradients.
        batches: the matrices that travel as factors, by shape in order of first appearance.
        whole: (offset, size) of the runs of the bucket that travel as they are.
        whole_size: their elements together.
        left_size: elements of all left factors.
        right_size: elements of all right factors.
    """

    def __init__(self, bucket: GradientBucket, rank: int, min_saving: float) -> None:
        self.shapes = [list(gradient.shape) for gradient in bucket.gradients]
        offsets: dict[tuple[int, int], list[int]] = {}
        self.whole: list[tuple[int, int]] = []
        for gradient in bucket.gradients:
            assert gradient.is_contiguous(), "gradients are pieces of the buffer"
            offset = int(gradient.storage_offset() - bucket.buffer.storage_offset())
            matrix = as_matrix(gradient.shape)
            if worth_factoring(matrix, rank, min_saving):
                offsets.setdefault(matrix, []).append(offset)
            else:
                _extend(self.whole, offset, gradient.numel())
        self.batches: list[MatrixBatch] = []
        self.left_size = self.right_size = 0
        for (rows, columns), places in offsets.items():
            for offset, distance, count in even_runs(places):
                thin = min(rank, rows, columns)
                batch = MatrixBatch(rows, columns, thin, count, offset, distance, self.left_size, self.right_size)
                self.left_size, self.right_size = batch.left_end, batch.right_end
                self.batches.append(batch)
        self.whole_size = sum(size for _, size in self.whole)


def even_runs(places: Sequence[int]) -> list[tuple[int, int, int]]:
    """Group places into runs of equal distances (first, distance, count): 1, 3, 5, 9 are (1, 2, 3) and (9, 0, 1)."""
    runs: list[tuple[int, int, int]] = []
    for place in places:
        first, distance, count = runs[-1] if runs else (place, 0, 0)
        if count == 1 and place > first:
            runs[-1] = (first, place - first, 2)
        elif count > 1 and place == first + count * distance:
            runs[-1] = (first, distance, count + 1)
        else:
            runs.append((place, 0, 1))
    return runs


def _extend(runs: list[tuple[int, int]], offset: int, size: int) -> None:
    """Add a piece to runs of pieces, joined to the last run where it touches it."""
    if runs and sum(runs[-1]) == offset:
        runs[-1] = (runs[-1][0], runs[-1][1] + size)
    else:
        runs.append((offset, size))
