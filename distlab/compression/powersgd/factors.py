"""PowerSGD's mathematics: a gradient matrix as the product of two thin ones, found by one step of power iteration.

The gradient of a layer is a large matrix M [n, m], yet a few directions hold most of it. PowerSGD sends
left [n, r] and right [m, r] with M ~ left right^T: (n + m) r numbers instead of n m. The best such pair is the
truncated singular value decomposition, which is far too slow to find in every step. Instead:

    left  = orthogonalize(M right)      # which outputs move, as seen through last step's right factor
    right = M^T left                    # what M is in those directions

One multiplication from each side is one step of power iteration. M changes little from step to step, so starting with
last step's right factor (warm start) makes the steps add up: the factors follow the best ones.

Both lines are linear in M up to the orthogonalization, and that one is applied to a sum. So the ranks never need the
mean of their matrices: the sum of all `M_w right` is `(sum of M_w) right`, and so for the second line. Two all-reduces
of thin matrices give what one process would compute from the mean. `hook` does that.

Symbols: M [n, m] a gradient matrix, r the rank of the approximation.

Source: Vogels, Karimireddy, Jaggi 2019, PowerSGD: Practical Low-Rank Gradient Compression, algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return orthonormal columns that span what the columns of a tall matrix span.

    By Householder's QR and not by Gram-Schmidt. Gradients without full rank are common: a unit that never fired, a head
    that starts at zero, a batch with fewer samples than columns. There Gram-Schmidt divides zero by zero or normalizes
    rounding errors. QR fills up with any other directions, which costs nothing: what M has in them
    is added, never lost. Half-precision matrices are decomposed in float32.

    Shapes: matrix [..., n, r] with r <= n -> [..., n, r]
    Error: columns are orthonormal to a few units of rounding, for any matrix of finite numbers.

    Raises:
        ValueError: more columns than rows; at most as many columns as rows can be orthogonal.
    """
    if matrix.dim() < 2 or matrix.shape[-1] > matrix.shape[-2]:
        raise ValueError(
            f"orthogonalize: got shape {list(matrix.shape)}; expected [..., n, r] with r <= n: lower the rank to "
            f"{matrix.shape[-2] if matrix.dim() >= 2 else 1}"
        )
    if matrix.dtype in HALVES:
        return orthogonalize(matrix.float()).to(matrix.dtype)
    directions: Tensor = torch.linalg.qr(matrix).Q
    return directions


def power_step(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Improve a right factor by one step of power iteration, and return it with its left factor.

    Shapes: matrix [..., n, m], right [..., m, r] -> left [..., n, r], right [..., m, r]
    Cost: 4 n m r floating-point operations and two passes over the matrix.
    Error: left right^T is the part of the matrix in the directions of left: |M - left right^T|^2 = |M|^2 - |right|^2.
        Nothing is lost when the matrix has at most r directions.
    """
    left = orthogonalize(matrix @ unit_columns(right))
    return left, matrix.mT @ left


def decompress(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix that the factors stand for.

    Shapes: left [..., n, r], right [..., m, r] -> [..., n, m]
    """
    return left @ right.mT


def unit_columns(matrix: Tensor) -> Tensor:
    """Return the columns, each of length 1; a column of zeros stays.

    Only the directions of a right factor matter. Its length is that of a gradient, and M right would be as small as a
    gradient's square: too small for half precision.

    Shapes: matrix [..., m, r] -> [..., m, r]
    """
    length: Tensor = torch.linalg.vector_norm(matrix, dim=-2, keepdim=True)
    return matrix / length.clamp_min(torch.finfo(matrix.dtype).tiny)


def first_right(columns: int, rank: int, generator: torch.Generator) -> Tensor:
    """Draw a right factor to begin with: normal numbers miss no direction.

    All ranks must draw the same, or their products M_w right are not parts of one sum.

    Shapes: -> [columns, rank]
    """
    return torch.randn(columns, rank, generator=generator, dtype=torch.float64).float()
