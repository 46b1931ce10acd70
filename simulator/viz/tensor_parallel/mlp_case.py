"""A tiny feed-forward layer in numbers, step by step: whole, and cut over ranks by columns and then by rows.

    Y = GeLU(X A) B, on rank r: Y_r = GeLU(X A_r) B_r, and the sum of all Y_r is Y

A is cut by columns, so that each rank has whole entries of X A and can bend them on its own: GeLU of a sum is not the
sum of GeLUs. Cut by rows, X A would have to be added up before it is bent. B is cut by rows, so that a rank's part of
the hidden layer is all that it needs; its product is as large as Y, and a summand of it.

Source: Shoeybi et al. 2019 (1909.08053), section 3, figure 3a.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class Stage(NamedTuple):
    """One column of the picture.

    Attributes:
        name: the value's, as in the formula.
        whole: as one process has it.
        parts: as each rank has it.
        step: of STEPS, at which ranks have it.
    """

    name: str
    whole: Floats
    parts: tuple[Floats, ...]
    step: int


class MlpCase(NamedTuple):
    """Values of the layer, in the order in which they are computed.

    Attributes:
        stages: X, A, X A, GeLU(X A), B, the ranks' summands, Y; what is not cut is the same on every rank.
        gradient_parts: each rank's part of X's gradient, for a loss that is the sum of Y.
        gradient: their sum, X's gradient.
    """

    stages: tuple[Stage, ...]
    gradient_parts: tuple[Floats, ...]
    gradient: Floats

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.gradient_parts)


STEPS = (
    "every rank has X (f: forward nothing)",
    "A is cut by columns: each rank multiplies X by its own",
    "GeLU, entry by entry: a rank has its entries whole, so nothing is exchanged",
    "B is cut by rows: each rank's product is a summand of Y",
    "g: an all-reduce adds the summands up, and every rank has Y",
    "backward, f: an all-reduce adds up the ranks' parts of X's gradient",
)


def mlp_case(
    num_ranks: int, x: ArrayLike | None = None, a: ArrayLike | None = None, b: ArrayLike | None = None
) -> MlpCase:
    """Compute the layer whole and on each rank.

    Shapes: x [B, H], a [H, F], b [F, H]; without them a case of B = 2, H = 2, F = 4
    Error: the ranks' sum is Y up to rounding.

    Raises:
        ValueError: the ranks do not divide F, or the shapes do not fit.
    """
    x, a, b = (
        np.asarray(default if given is None else given, dtype=np.float64)
        for given, default in zip((x, a, b), _default(), strict=True)
    )
    if x.ndim != 2 or a.ndim != 2 or x.shape[1] != a.shape[0] or b.shape != a.shape[::-1]:
        raise ValueError(f"shapes {x.shape}, {a.shape}, {b.shape}; expected x [B, H], a [H, F] and b [F, H]")
    if num_ranks < 1 or a.shape[1] % num_ranks:
        raise ValueError(f"{num_ranks} ranks do not divide {a.shape[1]} hidden features; use a divisor of it")
    columns, rows = np.split(a, num_ranks, axis=1), np.split(b, num_ranks, axis=0)
    products = [x @ part for part in columns]
    bent = [gelu(product) for product in products]
    summands = [hidden @ part for hidden, part in zip(bent, rows, strict=True)]
    total = np.sum(summands, axis=0)
    gradients = [
        ((np.ones_like(total) @ row.T) * gelu_slope(product)) @ column.T
        for row, product, column in zip(rows, products, columns, strict=True)
    ]
    stages = (
        Stage("X", x, (x,) * num_ranks, 0),
        Stage("A", a, tuple(columns), 1),
        Stage("X A", x @ a, tuple(products), 1),
        Stage("GeLU", gelu(x @ a), tuple(bent), 2),
        Stage("B", b, tuple(rows), 3),
        Stage("summand", gelu(x @ a) @ b, tuple(summands), 3),
        Stage("Y", gelu(x @ a) @ b, (total,) * num_ranks, 4),
    )
    return MlpCase(stages, tuple(gradients), np.sum(gradients, axis=0))


def gelu(x: Floats) -> Floats:
    """Return x times the normal distribution's function at x, by its approximation with tanh.

    Source: Hendrycks and Gimpel 2016 (1606.08415), section 2.
    """
    return np.asarray(0.5 * x * (1 + np.tanh(_inner(x))))


def gelu_slope(x: Floats) -> Floats:
    """Return the derivative of `gelu`."""
    bend = np.tanh(_inner(x))
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return np.asarray(0.5 * (1 + bend) + 0.5 * x * (1 - bend**2) * slope)


def _inner(x: Floats) -> Floats:
    return np.asarray(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def _default() -> tuple[list[list[float]], ...]:
    x = [[1.0, -0.5], [-1.5, 2.0]]
    a = [[0.5, -1.0, 2.0, 0.0], [1.0, 0.5, -0.5, -1.0]]
    b = [[1.0, -0.5], [0.5, 2.0], [-1.0, 1.5], [2.0, 1.0]]
    return x, a, b
