"""Say how the items of one list become those of another, and in which order elements are wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LONGEST = 64  # of the lists that are looked at: each place is tried
MANY = 6  # elements of which some may be wrong in an order that tells


def items_moved(got: Sequence[Any], want: Sequence[Any], alike: Callable[[Any, Any], bool]) -> str:
    """Return words for a list that is reversed or rolled, or lacks one item or has one too many; "" for all others.

    Args:
        got: what there is.
        want: what was expected.
        alike: tells whether two items are equal.
    """

    def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
        return len(one) == len(other) and all(map(alike, one, other))

    size = len(want)
    if size > LONGEST or abs(len(got) - size) > 1 or same(got, want):
        return ""
    if len(got) != size:
        longer, shorter = (want, got) if len(got) < size else (got, want)
        odd = [at for at in range(len(longer)) if same([*longer[:at], *longer[at + 1 :]], shorter)]
        return f"; item {odd[-1]} is {'missing' if len(got) < size else 'too many'}" if odd else ""
    if same(got, want[::-1]):
        return "it is reversed"
    step = next((step for step in range(1, size) if same(got, [*want[-step:], *want[:-step]])), 0)
    return f"it is rolled by {step if step <= size // 2 else step - size}" if step else ""


def which(wrong: Tensor) -> str:
    """Say so where the wrong elements are all from one on, all before one, or at equal distances; else "".

    Args:
        wrong: whether each element of a row is wrong.
    """
    places, size = wrong.nonzero()[:, 0], len(wrong)
    if not 1 < len(places) < size - 1 or size < MANY:
        return ""
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places):
        if last == size - 1:
            return f": all from element {first} of {size} on, and none before"
        return f": all of the first {last + 1} of {size}, and none after" if first == 0 else ""
    step = int(places[1]) - first
    if len(places) > 2 and torch.equal(places, torch.arange(first, last + 1, step)):
        return f": one in every {step}, from element {first} on"
    return ""
