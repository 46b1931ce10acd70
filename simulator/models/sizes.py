"""What sizes of a model make sense: at least 1, and no more than any model has; larger ones are slips of the hand."""

from __future__ import annotations

from numbers import Integral

MOST = 10**9
MOST_OF = {
    "num_layers": 10_000,
    "num_experts": 10_000,
}  # each is a record of its own, so that more of them take minutes


def require_sizes(owner: str, **values: int | None) -> None:
    """Refuse a size that is less than 1, or larger than any model's; None was not given.

    Raises:
        ValueError: which one, and what to pass.
    """
    for name, value in values.items():
        most = MOST_OF.get(name, MOST)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{owner}: {name} is {value!r}; pass a whole number of at least 1")
        if value > most:
            raise ValueError(f"{owner}: {name} is {shown(value)}; pass at most {most:,}")


def shown(value: int) -> str:
    """Write a number that may have hundreds of digits."""
    return f"{value:,}" if value < 10**15 else f"a number of {len(str(value))} digits"
