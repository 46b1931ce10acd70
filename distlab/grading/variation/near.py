"""Compare results of drawn calls: whether two are equal, whether one holds drawn numbers, and what its parts are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from distlab.grading.diagnosis.values import compare, equal, tolerance_of


def near(got: Any, want: Any, scale: float) -> bool:
    """Whether two results are equal up to the roundings of their dtype, relative to the numbers they came from."""
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        if got.shape != want.shape or got.dtype != want.dtype:
            return False
        if not want.is_floating_point() or equal(got, want):
            return equal(got, want)
        limit = tolerance_of(want.dtype) * scale * (8 if want.element_size() == 2 else 1)  # 16 bits: values up to 8
        return torch.allclose(got, want, rtol=0.0, atol=limit, equal_nan=True)
    if isinstance(want, list | tuple) and isinstance(got, list | tuple):
        return len(got) == len(want) and all(near(*pair, scale) for pair in zip(got, want, strict=True))
    if isinstance(want, dict) and isinstance(got, dict):
        return got.keys() == want.keys() and all(near(got[key], want[key], scale) for key in want)
    return compare(got, want) is None


def is_telling(value: Any) -> bool:
    """Whether a value has drawn numbers in it, so that two calls with other arguments never give the same one."""
    if isinstance(value, torch.Tensor):
        return value.numel() > (0 if value.is_floating_point() else 3) and bool(value.any())
    if isinstance(value, list | tuple):
        return any(is_telling(item) for item in value)
    return isinstance(value, dict) and any(is_telling(item) for item in value.values())


def outcome(call: dict[str, Any]) -> Any:
    """Return a call's result, or what it left in its arguments where it returns nothing."""
    return dict(call["after"]) if call["result"] is None else call["result"]


def parts(result: Any) -> Iterator[tuple[str, Any]]:
    """Yield a result, and what is in it by place, if it is a dict or a list of a few parts."""
    yield "", result
    if isinstance(result, dict):
        yield from ((f"[{key!r}]", value) for key, value in result.items())
    elif isinstance(result, list | tuple) and 1 < len(result) <= 4:
        yield from ((f"[{index}]", value) for index, value in enumerate(result))
