"""Checks of the fields of records: each refusal names the record, the field, the value and what to pass."""

from __future__ import annotations

import math


def require(ok: bool, text: str) -> None:
    """Raise ValueError with the text unless ok."""
    if not ok:
        raise ValueError(text)


def require_positive(owner: str, **values: float) -> None:
    """Refuse a field that is not greater than zero."""
    for name, value in values.items():
        require(value > 0 and not math.isnan(value), f"{owner}: {name} is {value!r}; pass a number greater than zero")


def require_count(owner: str, **values: int) -> None:
    """Refuse a field that is no whole number of at least 1."""
    for name, value in values.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        require(whole and value >= 1, f"{owner}: {name} is {value!r}; pass a whole number of at least 1")
