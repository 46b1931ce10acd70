"""Checks of the fields of records and of counts: each refusal names the field, the value and what to pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np

Record = TypeVar("Record")
MOST = 2**62  # columns of numbers have 64 bits


def require(ok: bool, text: str) -> None:
    """Raise ValueError with the text unless ok."""
    if not ok:
        raise ValueError(text)


def chosen(what: str, value: object, options: Iterable[str]) -> None:
    """Raise ValueError, with the value and what may be chosen, unless the value is one of the options."""
    names = tuple(options)
    if value not in names:
        raise ValueError(f"{what} is {value!r}; choose one of {', '.join(names)}")


def changed(record: Record, **values: Any) -> Record:
    """Return a frozen record with other values of some fields: `replace`, without the checks of a new record.

    For values that follow from checked ones, and records that keep nothing which follows from what changes.
    """
    other = object.__new__(type(record))
    vars(other).update(vars(record), **values)
    return other


def require_positive(owner: str, **values: float) -> None:
    """Refuse a field that is not greater than zero."""
    for name, value in values.items():
        require(value > 0 and not math.isnan(value), f"{owner}: {name} is {value!r}; pass a number greater than zero")


def require_least(owner: str, least: float = 0, /, **values: float) -> None:
    """Refuse a field that is below the least."""
    for name, value in values.items():
        require(value >= least, f"{owner}: {name} is {value!r}; pass a number of at least {least}")


def require_count(owner: str = "", /, **values: int) -> None:
    """Refuse a field, or an argument where there is no owner, that is not a whole number of at least 1."""
    for name, value in values.items():
        if type(value) is int and 1 <= value <= MOST:
            continue  # the usual case: the texts cost more than the check
        what = f"{owner}: {name}" if owner else name
        whole = isinstance(value, int if owner else int | np.integer) and not isinstance(value, bool)
        require(whole and value >= 1, f"{what} is {value!r}; pass a whole number of at least 1")
        require(value <= MOST, f"{what} has {len(str(value))} digits; pass at most {MOST:,}")
