"""Balance: samples of unequal lengths, so dealt out that the busiest rank has little more to do than the others.

All ranks wait for the slowest. The batch stays; only who takes which sample changes. Ranks then have unequal numbers of
tokens, so that each one's mean loss needs a weight: `Loader.weight`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def attention_work(lengths: ArrayLike, hidden_size: int) -> NDArray[np.float64]:
    """Return the work of samples in a GPT, in units of one token's products with weights.

    A block of size h multiplies a token by 12 h^2 weights, and with 2 h numbers of each token of its sample: of k
    tokens that is k (1 + k / 6h).

    Shapes: lengths [N] -> [N]

    Source: Narayanan et al. 2021 (2104.04473), equation 2.
    """
    sizes = np.asarray(lengths, np.float64)
    return np.asarray(sizes * (1 + sizes / (6 * hidden_size)))


def balance(work: Sequence[float] | NDArray[np.float64], num_ranks: int) -> list[list[int]]:
    """Deal out samples: the one with most work first, each to the rank that is least busy.

    Args:
        work: of each sample, above 0.
        num_ranks: at most as many as samples.

    Returns:
        The samples of each rank, ascending; none is empty.

    Error: the busiest rank has at most 4/3 of the least possible.

    Raises:
        ValueError: there are fewer samples than ranks, or work that is not above 0.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies".
    """
    costs = np.asarray(work, np.float64)
    if not 1 <= num_ranks <= len(costs) or not (costs > 0).all():
        raise ValueError(f"{len(costs)} samples for {num_ranks} ranks; pass at least one each, with work above 0")
    busy, dealt = [(0.0, rank) for rank in range(num_ranks)], [list[int]() for _ in range(num_ranks)]
    for sample in np.argsort(-costs, kind="stable").tolist():
        load, rank = busy[0]
        dealt[rank].append(sample)
        heapq.heapreplace(busy, (load + float(costs[sample]), rank))
    return [sorted(own) for own in dealt]
