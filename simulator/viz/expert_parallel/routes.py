"""Routes: which experts tokens ask, which choices find room, and how many rows go from rank to rank.

Every rank routes its own tokens. An expert takes from each rank at most that rank's capacity: all first choices come
before all second ones, and among equals the earlier token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]


class Routes(NamedTuple):
    """Choices of tokens, rank by rank.

    Attributes:
        experts: what each token of each rank asks, the first choice first: one [T, K] per rank.
        kept: whether there was room, likewise.
        num_experts: of all ranks; each holds as many, in order.
        capacity: places that an expert has for each rank; None: as many as come.
    """

    experts: tuple[Ints, ...]
    kept: tuple[NDArray[np.bool_], ...]
    num_experts: int
    capacity: int | None

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.experts)

    @property
    def experts_per_rank(self) -> int:
        """How many experts a rank holds."""
        return self.num_experts // self.num_ranks

    @property
    def asked(self) -> Ints:
        """How often each expert is asked [E]."""
        return np.bincount(np.concatenate([one.ravel() for one in self.experts]), minlength=self.num_experts)

    @property
    def rows(self) -> Ints:
        """Rows that each rank sends to each expert [n, E]."""
        return np.stack(
            [
                np.bincount(one[kept], minlength=self.num_experts)
                for one, kept in zip(self.experts, self.kept, strict=True)
            ]
        )

    @property
    def between(self) -> Ints:
        """Rows that each rank sends to each rank, itself included [n, n]."""
        return np.asarray(self.rows.reshape(self.num_ranks, self.num_ranks, -1).sum(axis=2), np.int64)

    @property
    def dropped(self) -> int:
        """How many choices were dropped."""
        return sum(int((~kept).sum()) for kept in self.kept)

    @property
    def lost(self) -> list[list[int]]:
        """The tokens of each rank of which no choice was kept."""
        return [np.flatnonzero(~kept.any(axis=1)).tolist() for kept in self.kept]

    def taken(self, expert: int, rank: int) -> list[int]:
        """Return the tokens of a rank that an expert takes, first choices first."""
        mine = ((self.experts[rank] == expert) & self.kept[rank]).T
        return [int(token) for token in np.nonzero(mine)[1]]


def routes_of(
    experts: Sequence[ArrayLike],
    *,
    num_experts: int,
    capacity: int | None = None,
    kept: Sequence[ArrayLike] | None = None,
) -> Routes:
    """Check the choices, and find out which of them are kept.

    Args:
        experts: numbers of the experts that each token of a rank asks, the first choice first: one [T, K] per rank.
        num_experts: E, of all ranks together.
        capacity: places that an expert has for the tokens of each rank; None: nothing is dropped.
        kept: which choices a run kept, one [T, K] per rank; by default it follows from capacity.

    Raises:
        ValueError: there is no rank; ranks do not divide the experts; an array is not [T, K] with the same K on all
            ranks; there is no such expert; the capacity is below zero; or `kept` has other shapes.
    """
    arrays = tuple(np.asarray(one, dtype=np.int64) for one in experts)
    count = len(arrays)
    if not count or num_experts < 1 or num_experts % count:
        raise ValueError(f"{num_experts} experts on {count} ranks; pass a number of experts that the ranks divide")
    for rank, one in enumerate(arrays):
        if one.ndim != 2 or one.shape[1:] != arrays[0].shape[1:]:
            raise ValueError(
                f"rank {rank}: experts has shape {list(one.shape)}; expected [tokens, choices], as on rank 0"
            )
        if one.size and not 0 <= one.min() <= one.max() < num_experts:
            raise ValueError(f"rank {rank}: experts are {one.min()} to {one.max()}; expected 0 to {num_experts - 1}")
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity is {capacity}; pass 0 or more, or None")
    if kept is None:
        masks = tuple(_within(one, capacity) for one in arrays)
    else:
        masks = tuple(np.asarray(one, dtype=bool) for one in kept)
        if [mask.shape for mask in masks] != [one.shape for one in arrays]:
            raise ValueError("kept has other shapes than experts; pass a mask of the same shape for each rank")
    return Routes(arrays, masks, num_experts, capacity)


def _within(experts: Ints, capacity: int | None) -> NDArray[np.bool_]:
    """Return which choices of one rank find room, first choices first: [T, K]."""
    if capacity is None:
        return np.ones(experts.shape, bool)
    wanted = experts.T.ravel()
    order = np.argsort(wanted, kind="stable")
    _, first, counts = np.unique(wanted[order], return_index=True, return_counts=True)
    room = np.empty(len(wanted), bool)
    room[order] = np.arange(len(wanted)) - np.repeat(first, counts) < capacity
    return room.reshape(experts.T.shape).T
