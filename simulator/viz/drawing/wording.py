"""Numbers, times, bytes and ranks in words, as titles, notes and the texts of pictures write them."""

from __future__ import annotations

from collections.abc import Sequence


def time_unit(seconds: float) -> tuple[float, str]:
    """Return what to multiply seconds by, and the unit, so that the number is easy to read."""
    if seconds >= 2.0:
        return 1.0, "s"
    if seconds >= 1e-3 or seconds == 0:
        return 1e3, "ms"
    return 1e6, "µs"


def byte_unit(num_bytes: float) -> tuple[float, str]:
    """Return what to divide bytes by, and the unit (GB is 1e9), so that the number is easy to read."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return size, unit
    return 1.0, "B"


def percent(share: float, digits: int = 0, sign: str = "") -> str:
    """Write a share as a percentage: 0.051 is '5 %'; `sign` '+' shows the plus too."""
    return f"{share * 100:{sign}.{digits}f} %"


def capitalised(text: str) -> str:
    """Begin a text with a capital letter and leave the other letters as they are."""
    return text[:1].upper() + text[1:]


def listed(names: Sequence[object]) -> str:
    """Write a list: 'a', 'a and b', 'a, b and c'."""
    *most, last = map(str, names)
    return f"{', '.join(most)} and {last}" if most else last


def name_ranks(ranks: Sequence[int]) -> str:
    """Write ranks in words: 'rank 1', 'ranks 1 and 3', 'ranks 0, 1 and 3'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"
