"""Count what a ring attention computes under a causal mask: which rank, at which hop, how many pairs of query and key.

A sequence is cut into two chunks per rank. In the straight order a rank holds two neighbours, in the zig-zag one chunk
from the front and the one as far from the back.

Symbols: n ranks, 2n chunks, S positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ORDERS = ("zigzag", "straight")
MAX_RANKS = 8
Ints = NDArray[np.int64]


class RingWork(NamedTuple):
    """What a causal ring attention computes.

    Attributes:
        order: one of ORDERS.
        length: positions of the whole sequence.
        owner: the rank that holds each chunk [2n].
        hop: when the rank of a query chunk has the keys of a key chunk: 0 is its own [2n, 2n].
        pairs: visible pairs of each block of query chunk and key chunk [2n, 2n].
        work: pairs that each rank computes at each hop [n, n].
    """

    order: str
    length: int
    owner: Ints
    hop: Ints
    pairs: Ints
    work: Ints

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.work)

    @property
    def ring_pairs(self) -> int:
        """Pairs that the ring takes time for: at each hop those of its busiest rank."""
        return int(self.work.max(axis=0).sum())

    @property
    def slowdown(self) -> float:
        """How many times longer the ring takes than if the work were even."""
        return self.ring_pairs * self.num_ranks / int(self.work.sum())

    def merged(self, rank: int, hop: int) -> list[int]:
        """Return the ranks whose keys a rank has merged after a hop, among those whose keys it may attend to."""
        rows = self.owner == rank
        visible = (self.pairs[rows] > 0) & (self.hop[rows] <= hop)
        return [int(other) for other in np.unique(self.owner[visible.any(axis=0)])]


def ring_work(num_ranks: int, order: str = "zigzag", *, length: int | None = None) -> RingWork:
    """Count the pairs of query and key that each rank computes at each hop, under a causal mask.

    Keys go to the next rank at each hop: at hop h rank r has those that began h ranks before it.

    Args:
        num_ranks: n, 1 to 8.
        order: "zigzag" or "straight".
        length: S, a multiple of 2n; by default 1,024 n.

    Raises:
        ValueError: the number of ranks, the order or the length is none of these.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"{num_ranks} ranks; pass 1 to {MAX_RANKS}: more cannot be told apart in a picture")
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; choose one of {', '.join(ORDERS)}")
    chunks = 2 * num_ranks
    length = 1024 * num_ranks if length is None else length
    if length < chunks or length % chunks:
        raise ValueError(
            f"a sequence of {length} cannot be cut into {chunks} equal chunks, 2 for each of {num_ranks} ranks; "
            f"pass a multiple of {chunks}"
        )
    place = np.arange(chunks)
    owner = place // 2 if order == "straight" else np.minimum(place, chunks - 1 - place)
    hop = (owner[:, None] - owner[None, :]) % num_ranks
    size = length // chunks
    pairs = np.tril(np.full((chunks, chunks), size * size), -1) + np.eye(chunks, dtype=np.int64) * (
        size * (size + 1) // 2
    )
    work = np.zeros((num_ranks, num_ranks), np.int64)
    np.add.at(work, (np.broadcast_to(owner[:, None], hop.shape), hop), pairs)
    return RingWork(order, length, owner, hop, pairs, work)
