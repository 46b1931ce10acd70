"""How wrong results follow from right ones: a factor or a summand made of the arguments, or which calls are wrong.

Only what holds in every drawn call, on every rank, is said.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.grading.diagnosis.values import constant_ratio
from distlab.grading.variation.near import near, outcome, parts

ROUNDED = 1e-3  # a factor as near to 1 is lost precision
FEWEST = 3  # wrong results that a factor or a summand must explain, and calls on each side of a condition on numbers
Number = int | float
Formula = tuple[str, Callable[..., float]]
_OF_ONE: tuple[Formula, ...] = (
    ("{0}", lambda a: a),
    ("({0} - 1)", lambda a: a - 1),
    ("({0} + 1)", lambda a: a + 1),
    ("{0} / ({0} - 1)", lambda a: a / (a - 1)),
    ("{0} / ({0} + 1)", lambda a: a / (a + 1)),
    ("{0}^2", lambda a: a * a),
    ("sqrt({0})", math.sqrt),
    ("2 * {0}", lambda a: 2 * a),
)
_OF_TWO: tuple[Formula, ...] = (("{0} / {1}", lambda a, b: a / b), ("{0} * {1}", lambda a, b: a * b))


_NOT_GIVEN = object()
_FUNCTIONS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("the magnitude of what is right", torch.abs),
    ("the square of what is right", torch.square),
    ("the root of what is right", torch.sqrt),
    ("1 over what is right", torch.reciprocal),
    ("1 minus what is right", lambda right: 1 - right),
    ("the exponential of what is right", torch.exp),
    ("the logarithm of what is right", torch.log),
    ("what is right, rounded to whole numbers", torch.round),
    ("what is right, with zeros for all that is below 0", torch.relu),
    ("what is right, brought to length 1", lambda right: right / right.norm()),
    ("what is right, with each column brought to length 1", lambda right: right / right.norm(dim=-2, keepdim=True)),
    ("what is right, with each row brought to length 1", lambda right: right / right.norm(dim=-1, keepdim=True)),
    ("what is right less its mean", lambda right: right - right.mean()),
    ("what is right, transposed", lambda right: right.mT if right.dim() > 1 else right),
)


class Seen(NamedTuple):
    """One call on one rank: what came out, what is right, and the plain arguments by name."""

    mine: Any
    right: Any
    given: dict[str, Any]


def relation(got: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], scale: float) -> str:
    """Return in words how the results of all drawn calls are wrong, or "" where nothing simple holds in all.

    Args:
        got: for each rank what `call_varied` returned for the answer.
        wanted: the same for the reference.
        scale: of the exercise.
    """
    seen, name = _seen(got, wanted, scale)
    wrong = [one for one in seen if not near(one.mine, one.right, scale)]
    whole = f"the result{name}" if name else "what it returns"
    if len({f"{one.mine} {one.right}" for one in wrong}) < FEWEST:  # all ranks may return the same
        return ""
    found = _factor(wrong, len(got)) or _summand(wrong) or _function(wrong, scale)
    calls = f"in all {len(got[0]['calls'])} drawn calls"
    if found and len(wrong) == len(seen):
        return f"{calls} {whole} is {found}."
    if found:
        return f"where it is wrong, in {len(wrong)} of {len(seen)} drawn results, {whole} is {found}."
    if where := _condition(seen, wrong):
        return f"{calls} {whole} is wrong where {where}, and right elsewhere."
    return ""


def _seen(got: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], scale: float) -> tuple[list[Seen], str]:
    """Return all calls on all ranks, with the first part of the results that is wrong in one; and its name."""
    calls = [
        (outcome(mine), outcome(right), _plain(right, rank, len(got)))
        for rank in range(len(got))
        for mine, right in zip(got[rank]["calls"], wanted[rank]["calls"], strict=True)
    ]
    names = [name for name in dict(parts(calls[0][1])) if name] or [""]
    for name in names:
        seen = [Seen(dict(parts(mine)).get(name), dict(parts(right)).get(name), given) for mine, right, given in calls]
        if not all(near(one.mine, one.right, scale) for one in seen):
            return seen, name
    return [], ""


def _plain(call: dict[str, Any], rank: int, n: int) -> dict[str, Any]:
    """Return what a call was given by name: numbers, texts, and the sizes of tensors and lists."""
    found: dict[str, Any] = {"rank": rank, "world_size": n} if n > 1 else {}
    for name, value in call["before"]:
        if isinstance(value, Tensor):
            found[f"{name}.numel()"] = value.numel()
            found |= {f"{name}.shape[{dim}]": size for dim, size in enumerate(value.shape)}
        elif name.startswith("length of "):
            found[f"len({name.removeprefix('length of ')})"] = value
        elif value is None or isinstance(value, bool | int | float | str):
            found[name] = value
    return found


def _factor(wrong: Sequence[Seen], n: int) -> str:
    wrong = [one for one in wrong if not (isinstance(one.right, Tensor) and one.right.element_size() == 2)]  # roundings
    ratios = [ratio for one in wrong if (ratio := _ratio(one.mine, one.right)) is not None]
    if len(wrong) < FEWEST or len(ratios) < len(wrong) or all(abs(ratio - 1) < ROUNDED for ratio in ratios):
        return ""
    if all(map(_close, ratios, ratios[:1] * len(ratios))):
        ranks = ", the number of ranks" if n > 1 and _close(ratios[0], n) else ""
        return f"{ratios[0]:.6g} times what is right{ranks}"
    for text, values in _made(wrong):
        if all(map(_close, ratios, values)):
            return f"{text} times what is right"
        if all(map(_close, [1 / ratio for ratio in ratios], values)):
            return f"what is right divided by {text}"
    return ""


def _summand(wrong: Sequence[Seen]) -> str:
    is_plain = all(_is_number(one.mine) and _is_number(one.right) for one in wrong)
    if len(wrong) < FEWEST or not is_plain:
        return ""
    gaps = [one.mine - one.right for one in wrong]
    if all(abs(gap) < ROUNDED * abs(one.right) for gap, one in zip(gaps, wrong, strict=True)):
        return ""
    if len({one.right for one in wrong}) > FEWEST and all(map(_close, gaps, gaps[:1] * len(gaps))):
        return f"{abs(gaps[0]):.6g} {'more' if gaps[0] > 0 else 'less'} than what is right"
    for text, values in _made(wrong):
        if all(map(_close, gaps, values)):
            return f"{text} more than what is right"
        if all(map(_close, [-gap for gap in gaps], values)):
            return f"{text} less than what is right"
    return ""


def _function(wrong: Sequence[Seen], scale: float) -> str:
    """Return which function of the right results is there; what is alike everywhere (zeros, say) tells of none."""
    pairs = [(_tensor(one.mine), _tensor(one.right)) for one in wrong]
    if len(wrong) < FEWEST or any(mine is None or right is None or not right.numel() for mine, right in pairs):
        return ""
    for words, function in _FUNCTIONS:
        with contextlib.suppress(RuntimeError, IndexError):
            made = [function(right) for _, right in pairs if right is not None]
            is_told = torch.cat([each.flatten().to(torch.float64) for each in made]).unique().numel() > 1
            if is_told and all(near(mine, each, scale) for (mine, _), each in zip(pairs, made, strict=True)):
                return words
    return ""


def _tensor(value: Any) -> Tensor | None:
    if _is_number(value):
        return torch.tensor(float(value), dtype=torch.float64)
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


def _ratio(mine: Any, right: Any) -> float | None:
    if isinstance(mine, Tensor) and isinstance(right, Tensor) and mine.shape == right.shape:
        return _ratio(mine.item(), right.item()) if right.numel() == 1 else constant_ratio(mine, right)
    if isinstance(mine, list | tuple) and isinstance(right, list | tuple) and len(mine) == len(right):
        ratios = [_ratio(*pair) for pair in zip(mine, right, strict=True)]
        known = [ratio for ratio in ratios if ratio is not None]
        return known[0] if known and len(known) == len(ratios) and all(_close(known[0], one) for one in known) else None
    if _is_number(mine) and _is_number(right) and right and mine:
        return float(mine / right)
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)


def _made(wrong: Sequence[Seen]) -> Iterator[tuple[str, list[float]]]:
    """Yield formulas of one or two numbers that each call was given, and their values; those that are all alike not."""
    shared = [name for name in wrong[0].given if all(_is_number(one.given.get(name)) for one in wrong)]
    formulas = [(*formula, [name]) for formula in _OF_ONE for name in shared]
    formulas += [(*_OF_TWO[0], [*pair]) for pair in permutations(shared, 2)]
    formulas += [(*_OF_TWO[1], [*pair]) for pair in combinations(shared, 2)]
    for text, formula, names in formulas:
        try:
            values = [formula(*(one.given[name] for name in names)) for one in wrong]
        except (ZeroDivisionError, ValueError, OverflowError):
            continue
        if len({*values}) > 1 and 0 not in values:
            yield text.format(*names), values


def _condition(seen: Sequence[Seen], wrong: Sequence[Seen]) -> str:
    """Return words for the calls that are wrong, by what they were given; "" where no words hold them apart."""
    bad = [one.given for one in wrong]
    good = [one.given for one in seen if not any(one is other for other in wrong)]
    if min(len(bad), len(good)) < FEWEST:
        return ""
    names = [*dict.fromkeys(name for one in seen for name in one.given)]
    for name in names:
        for inside, outside, verb in ((bad, good, "is"), (good, bad, "is not")):
            value = inside[0].get(name, _NOT_GIVEN)
            if value is _NOT_GIVEN or (_is_number(value) and value not in (0, 1)):
                continue  # one number of many may be a chance
            found = [[repr(one.get(name, _NOT_GIVEN)) == repr(value) for one in calls] for calls in (inside, outside)]
            if all(found[0]) and not any(found[1]):
                return f"{name} {verb} {value!r}"
    whole = [name for name in names if all(type(at := one.given.get(name)) is int and at > 0 for one in seen)]
    cuts = [name for name in whole if name.startswith("len(") or not name.endswith((")", "]"))]
    if min(len(bad), len(good)) == FEWEST:
        return ""
    for one, other in ((one, other) for one in whole for other in cuts if one != other):
        if all(each[one] % each[other] for each in bad) and not any(each[one] % each[other] for each in good):
            return f"{other} does not divide {one}"
    plain = [name for name in names if name.isidentifier() and all(_is_number(one.given.get(name)) for one in seen)]
    for one, other in permutations(plain, 2):
        if all(each[one] < each[other] for each in bad) and all(each[one] >= each[other] for each in good):
            return f"{one} is below {other}"
        if all(each[one] <= each[other] for each in bad) and all(each[one] > each[other] for each in good):
            return f"{one} is not above {other}"
    return ""
