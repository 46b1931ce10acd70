"""Send a few elements: the largest (top-k), or some that all ranks draw alike (random-k).

Most of a gradient's length sits in few of its elements, so 1 % of them points nearly the same way. But every rank has
its own largest elements. Values without their indices cannot be added, so they are gathered from all ranks and added
here. Random-k sends no indices: ranks that draw with one seed draw the same. Then values do line up, and an ordinary
all-reduce adds them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLED = 64  # one element in 64 is looked at, to guess the size above which an element is kept
MIN_SAMPLED_SIZE = 1 << 15  # below, looking at all of them costs less than guessing


def top_k(vector: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the indices, ascending, and the values of the k elements that are largest in size.

    NaN counts as larger than any number, so that it is never hidden.

    Shapes: vector [E] -> indices [k] int64, values [k]
    Error: exact; among elements of equal size it is not said which are taken.

    Raises:
        ValueError: the vector is not flat, or k is not a whole number from 1 to E.

    Source: Aji and Heafield 2017, Sparse Communication for Distributed Gradient Descent; the sample that narrows the
        search: Lin et al. 2018, Deep Gradient Compression, section 5. Here the result stays exact.
    """
    _check(vector, k)
    sizes = vector.abs()
    candidates = _candidates(sizes, k)
    if candidates is None:
        indices = sizes.topk(k, sorted=False).indices
    else:
        indices = candidates[sizes[candidates].topk(k, sorted=False).indices]
    indices = indices.sort().values  # so that the elements are read in the order in which they lie
    return indices, vector[indices]


def _candidates(sizes: Tensor, k: int) -> Tensor | None:
    """Return indices that the k largest are among, or None where it is not worth it.

    The k-th largest of a sample, made somewhat lower, is exceeded by more than k elements, and not by many more.
    """
    if sizes.numel() < MIN_SAMPLED_SIZE or k * 4 > sizes.numel() or sizes.device.type != "cpu":
        return None
    sample = sizes[::SAMPLED]
    expected = k * sample.numel() / sizes.numel()
    place = int(expected + 4 * expected**0.5) + 4  # four standard deviations more than k elements' share
    if place >= sample.numel():
        return None
    threshold = sample.topk(place, sorted=False).values.min()
    above = (sizes < threshold).logical_not_().nonzero().view(-1)  # so said, NaN is above
    return above if k <= above.numel() <= sizes.numel() // 2 else None


def scatter(indices: Tensor, values: Tensor, size: int) -> Tensor:
    """Return a vector of zeros with values at indices.

    Shapes: indices [k], values [k] -> [size]
    """
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_copy_(0, indices, values)


def random_indices(size: int, k: int, generator: torch.Generator) -> Tensor:
    """Return k different indices below size, ascending, every set of k as likely as any other.

    Ranks that pass generators of equal state get equal indices.

    Shapes: -> [k] int64, on the generator's device

    Raises:
        ValueError: k is not a whole number from 1 to size.
    """
    _check_k(k, size)
    return _draw(size, k, generator)


def _draw(size: int, k: int, generator: torch.Generator) -> Tensor:
    """Draw as `random_indices`; k may be 0.

    A permutation of all would cost more than the few that are wanted. So tick what is drawn, and draw about as often as
    it takes to tick k; draw more if need be, and take surplus ticks away by chance. Neither prefers any index.
    """
    if k > size // 2:
        return (~_ticked(size, _draw(size, size - k, generator))).nonzero().view(-1)
    num_draws = math.ceil(-size * math.log1p(-k / size)) if k else 0  # which tick k on average
    ticks = _ticked(size, _below(size, num_draws, generator))
    while (indices := ticks.nonzero().view(-1)).numel() < k:
        ticks[_below(size, k - indices.numel() + 8, generator)] = True
    surplus = indices.numel() - k
    if surplus:
        indices = indices[~_ticked(indices.numel(), _draw(indices.numel(), surplus, generator))]
    return indices


def _below(size: int, number: int, generator: torch.Generator) -> Tensor:
    return torch.randint(size, (number,), generator=generator, device=generator.device)


def _ticked(size: int, indices: Tensor) -> Tensor:
    return torch.zeros(size, dtype=torch.bool, device=indices.device).index_fill_(0, indices, True)


def _check(vector: Tensor, k: int) -> None:
    if vector.dim() != 1:
        raise ValueError(f"the vector has shape {list(vector.shape)}; pass one dimension, such as vector.view(-1)")
    _check_k(k, vector.numel())


def _check_k(k: int, size: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= size:
        raise ValueError(f"k is {k!r}; pass how many of {size} elements to keep, a whole number from 1 to {size}")
