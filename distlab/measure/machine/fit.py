"""What turns repeated measurements into numbers: programs that take turns, medians of records, fits above zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MIN_BLOCKS = 20


def interleave(programs: Sequence[Callable[[], float]], blocks: int = MIN_BLOCKS) -> list[list[float]]:
    """Run the programs in turn, every second block in reverse order; each call returns its own time in seconds.

    On a shared machine a slow moment must hit all programs that are compared, not one.
    """
    times: list[list[float]] = [[] for _ in programs]
    for block in range(blocks):
        order = range(len(programs)) if block % 2 == 0 else reversed(range(len(programs)))
        for index in order:
            times[index].append(programs[index]())
    return times


def median_of(records: Sequence[Any]) -> Any:
    """Combine records of one shape into one: each number becomes its median, all else is as in the first record.

    Records are numbers, or dataclasses, mappings and tuples of records.
    """
    first = records[0]
    if isinstance(first, int | float):
        middle = float(median(records))  # numpy's loads numpy.ma, 13 ms in each rank
        return first if middle == first else middle  # a count stays an int
    if isinstance(first, Mapping):
        return {key: median_of([record[key] for record in records]) for key in first}
    if isinstance(first, tuple):
        parts = [median_of(each) for each in zip(*records, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first) if field.init]
        return replace(first, **{name: median_of([getattr(record, name) for record in records]) for name in names})
    return first


def fit_nonnegative(rows: Floats, wanted: Floats) -> Floats:
    """Return coefficients, none negative, for which `rows @ coefficients` is nearest to `wanted` (least squares).

    It tries every choice of columns and keeps the best whose coefficients are all positive; the other columns get 0.

    Shapes: rows [m, k], wanted [m] -> [k]
    """
    num_columns = rows.shape[1]
    scale = rows.max(axis=0)
    best, best_error = np.zeros(num_columns), float(wanted @ wanted)
    for count in range(1, num_columns + 1):
        for columns in map(list, combinations(range(num_columns), count)):
            solved, _, rank, _ = np.linalg.lstsq(rows[:, columns] / scale[columns], wanted, rcond=None)
            if rank < count or (solved <= 0).any():
                continue
            full = np.zeros(num_columns)
            full[columns] = solved / scale[columns]
            error = float(((rows @ full - wanted) ** 2).sum())
            if error < best_error:
                best, best_error = full, error
    return best


def fit_line(sizes: Sequence[float], seconds: Sequence[float], *, relative: bool = False) -> tuple[float, float]:
    """Fit seconds = fixed + size x rate with the least squares, neither negative; `relative`: of the relative error."""
    x, y = np.array(sizes, float), np.array(seconds, float)
    weight = 1 / np.maximum(y, 1e-9) if relative else np.ones_like(y)
    fixed, rate = fit_nonnegative(np.stack([weight, x * weight], axis=1), y * weight).tolist()
    return fixed, rate
