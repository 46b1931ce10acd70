"""Whose is which part of a weight: what the ranks hold, put together again with an owner for every row or column.

Works on arrays and on anything that says how a tensor is cut: `distlab.tensor_parallel.Split` is such a thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class SplitLike(Protocol):
    """How a tensor is cut along one dim; sections are cut apart each, as query, key and value of a fused weight."""

    @property
    def dim(self) -> int:
        """The dim that is cut."""

    @property
    def sections(self) -> Sequence[int]:
        """Lengths along the dim of what is cut apart."""


class CutWeight(NamedTuple):
    """One weight as the ranks hold it.

    Attributes:
        name: as the model calls it.
        values: the whole, with what the last ranks have in padding.
        dim: the dim that is cut, or None: every rank holds it all.
        sections: lengths along dim of what is cut apart, without padding.
        owner: the rank of each place along dim; -1 for padding.
        num_ranks: how many hold it.
    """

    name: str
    values: NDArray[np.float64]
    dim: int | None
    sections: tuple[int, ...]
    owner: NDArray[np.int64]
    num_ranks: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole, without padding."""
        shape = list(self.values.shape)
        if self.dim is not None:
            shape[self.dim] = sum(self.sections)
        return tuple(shape)

    @property
    def held(self) -> int:
        """Numbers that a rank keeps, padding included."""
        return self.values.size // (1 if self.dim is None else self.num_ranks)

    def slices(self, rank: int) -> list[tuple[int, int]]:
        """Return (start, stop) of a rank's part of each section, along dim of the whole without padding."""
        found, begin = [], 0
        for size in self.sections:
            width = -(-size // self.num_ranks)
            low, high = min(rank * width, size), min((rank + 1) * width, size)
            found.append((begin + low, begin + high))
            begin += size
        return found


def array_of(value: Any) -> NDArray[np.float64]:
    """Return a value's numbers, also of a tensor that has a gradient."""
    detach = getattr(value, "detach", None)
    return np.asarray(value if detach is None else detach(), dtype=np.float64)


def cut_weights(weights: Mapping[str, Any], splits: Mapping[str, SplitLike], num_ranks: int) -> list[dict[str, Any]]:
    """Cut whole weights as `splits` say: what each rank would hold, rank 0 first.

    Sections that the ranks do not divide are filled up with zeros.

    Raises:
        ValueError: less than one rank, or sections that are not the weight's length.
    """
    if num_ranks < 1:
        raise ValueError(f"{num_ranks} ranks; pass at least 1")
    parts: list[dict[str, Any]] = [{} for _ in range(num_ranks)]
    for name, value in weights.items():
        whole = array_of(value)
        for rank in range(num_ranks):
            parts[rank][name] = _part(name, whole, splits[name], num_ranks, rank) if name in splits else whole
    return parts


def _part(name: str, whole: NDArray[np.float64], split: SplitLike, num_ranks: int, rank: int) -> NDArray[np.float64]:
    if sum(split.sections) != whole.shape[split.dim]:
        raise ValueError(
            f"{name}: sections {tuple(split.sections)} sum to {sum(split.sections)}; expected the "
            f"{whole.shape[split.dim]} of dim {split.dim} of shape {list(whole.shape)}"
        )
    pieces = []
    for section in np.split(whole, np.cumsum(split.sections)[:-1], axis=split.dim):
        width = -(-section.shape[split.dim] // num_ranks)
        padding = [(0, 0)] * section.ndim
        padding[split.dim] = (0, width * num_ranks - section.shape[split.dim])
        filled = np.pad(section, padding)
        pieces.append(np.take(filled, range(rank * width, (rank + 1) * width), axis=split.dim))
    return np.concatenate(pieces, axis=split.dim)


def shards_of(parts: Sequence[Mapping[str, Any]], splits: Mapping[str, SplitLike]) -> dict[str, CutWeight]:
    """Put the ranks' parts together, and say whose each is.

    Args:
        parts: what every rank holds, by name, rank 0 first; arrays or tensors.
        splits: how those that are cut are cut; what is not named is whole on every rank.

    Raises:
        ValueError: there is no rank, ranks hold different names, or a part has a different shape than its split says.
    """
    if not parts:
        raise ValueError("there is no rank; pass what every rank holds, rank 0 first")
    found: dict[str, CutWeight] = {}
    for rank, part in enumerate(parts):
        if set(part) != set(parts[0]):
            odd = ", ".join(sorted(set(part) ^ set(parts[0])))
            raise ValueError(f"rank {rank}: holds other weights than rank 0: {odd}; pass the same names of every rank")
    for name in parts[0]:
        arrays = [array_of(part[name]) for part in parts]
        split = splits.get(name)
        if split is None:
            _require_shapes(name, arrays, arrays[0].shape)
            found[name] = CutWeight(name, arrays[0], None, (), np.zeros(0, np.int64), len(parts))
        else:
            found[name] = _joined(name, arrays, split)
    return found


def _joined(name: str, arrays: Sequence[NDArray[np.float64]], split: SplitLike) -> CutWeight:
    num_ranks, dim, sections = len(arrays), split.dim, tuple(split.sections)
    widths = [-(-size // num_ranks) for size in sections]
    expected = list(arrays[0].shape)
    expected[dim] = sum(widths)
    _require_shapes(name, arrays, tuple(expected))
    pieces, owners, begin = [], [], 0
    for size, width in zip(sections, widths, strict=True):
        pieces += [np.take(array, range(begin, begin + width), axis=dim) for array in arrays]
        owner = np.repeat(np.arange(num_ranks), width)
        owner[size:] = -1
        owners.append(owner)
        begin += width
    return CutWeight(name, np.concatenate(pieces, axis=dim), dim, sections, np.concatenate(owners), num_ranks)


def _require_shapes(name: str, arrays: Sequence[NDArray[np.float64]], expected: tuple[int, ...]) -> None:
    for rank, array in enumerate(arrays):
        if array.shape != expected:
            raise ValueError(
                f"rank {rank}: {name} has shape {list(array.shape)}; expected {list(expected)}: pass each rank's own "
                "part, or cut whole weights by cut_weights"
            )
