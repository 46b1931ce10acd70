"""In which of the drawn calls a result is wrong, by what they were given: nothing but what holds in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distlab.grading.variation.near import near, outcome

FEWEST = 3  # calls on each side of a condition
Arguments = dict[str, Any]
_NOT_GIVEN = object()


def condition(got: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], scale: float) -> str:
    """Return words for the drawn calls that are wrong, such as "q.shape[1] is not 1"; "" where none hold them apart."""
    bad: list[Arguments] = []
    good: list[Arguments] = []
    for rank, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        for one, other in zip(mine["calls"], theirs["calls"], strict=True):
            given = _given(other, rank, len(got))
            (good if near(outcome(one), outcome(other), scale) else bad).append(given)
    if min(len(bad), len(good)) < FEWEST:
        return ""
    names = [*dict.fromkeys(name for one in (*bad, *good) for name in one)]
    for name in names:
        for inside, outside, verb in ((bad, good, "is"), (good, bad, "is not")):
            value = inside[0].get(name, _NOT_GIVEN)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is _NOT_GIVEN or (is_number and value not in (0, 1)):
                continue  # one number of many may be a chance
            if verb == "is not" and value == 0 and name.endswith((")", "]")):
                continue  # wrong wherever there are elements: that tells nothing
            found = [[repr(one.get(name, _NOT_GIVEN)) == repr(value) for one in calls] for calls in (inside, outside)]
            if all(found[0]) and not any(found[1]):
                return f"{name} {verb} {value!r}"
    whole = [name for name in names if all(type(at := one.get(name)) is int and at > 0 for one in (*bad, *good))]
    cuts = [name for name in whole if name.startswith("len(") or not name.endswith((")", "]"))]
    for one, other in ((one, other) for one in whole for other in cuts if one != other):
        if all(each[one] % each[other] for each in bad) and not any(each[one] % each[other] for each in good):
            return f"{other} does not divide {one}"
    return ""


def _given(call: dict[str, Any], rank: int, n: int) -> Arguments:
    """Return what a call was given by name: numbers, texts, and the sizes of tensors and lists."""
    found: Arguments = {"rank": rank, "world_size": n} if n > 1 else {}
    for name, value in call["before"]:
        if isinstance(value, Tensor):
            found[f"{name}.numel()"] = value.numel()
            found |= {f"{name}.shape[{dim}]": size for dim, size in enumerate(value.shape)}
        elif name.startswith("length of "):
            found[f"len({name.removeprefix('length of ')})"] = value
        elif value is None or isinstance(value, bool | int | float | str):
            found[name] = value
    return found
