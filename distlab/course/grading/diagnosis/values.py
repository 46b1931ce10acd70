"""Compare tensors with what was expected, and say the difference in words: ratios, whose part is missing, who differs.

Everything takes what a learner's function returned, whatever that is, and answers with a Fault or None.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distlab.course.grading.exercise import Fault

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SUM_NOT_MEAN = "it is the sum over ranks, not the mean: divide by world_size ({})"
DIVIDED_TWICE = "it was divided by world_size ({}) once too often"


def seeded(rank: int, *shape: int, purpose: str = "") -> Tensor:
    """Make a float64 tensor of normal numbers, the same in every run, different on every rank and for every purpose."""
    digest = hashlib.blake2b(f"{purpose} {rank}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """Put the elements of several tensors into one row."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the relative difference up to which values of this dtype count as equal."""
    return _TOLERANCE.get(dtype, 0.0)


def compare(got: Any, want: Any, what: str = "the result", world_size: int = 1) -> Fault | None:
    """Say how `got` differs from `want`, or return None where they are equal (1e-10 relative in float64).

    Tensors, numbers, texts, None, and lists, tuples and dicts of them; a list counts as a tuple.

    Args:
        got: what there is.
        want: what was expected.
        what: a name for it in the message, such as "rank 2's gradient".
        world_size: explains a constant ratio: 4x too large on 4 ranks is a sum where a mean was asked.
    """
    if isinstance(want, Tensor):
        return _form(got, want, what) or _compare_tensors(got.detach(), want.detach(), what, world_size)
    if isinstance(want, dict):
        if not isinstance(got, dict):
            wanted = f"the names {sorted(map(str, want))}" if want else "an empty dict"
            return Fault("returned", f"{what}: expected {wanted}, got {describe(got)}")
        if got.keys() != want.keys():
            odd = {"it lacks": want.keys() - got.keys(), "it must not have": got.keys() - want.keys()}
            text = "; ".join(f"{words} {sorted(map(str, names))}" for words, names in odd.items() if names)
            return Fault("returned", f"{what}: {text}")
        pairs = [(f"{what}[{key!r}]", got[key], want[key]) for key in want]
    elif isinstance(want, list | tuple):
        is_list = isinstance(got, list | tuple)
        if not is_list or len(got) != len(want):
            text = f"{what}: expected {describe(want)}, got {describe(got)}"
            if is_list and got and want and near([*got][: len(want)], [*want][: len(got)]):
                more = len(got) - len(want)
                text += f": {abs(more)} {'too many' if more > 0 else 'missing'} at its end"
            return Fault("returned", text)
        pairs = [(f"{what}[{index}]", *pair) for index, pair in enumerate(zip(got, want, strict=True))]
    elif isinstance(want, float) and isinstance(got, int | float | Tensor) and not isinstance(got, bool):
        if isinstance(got, Tensor) and got.numel() != 1:
            return Fault("returned", f"{what}: expected a number, got {describe(got)}")
        number = torch.tensor(float(got), dtype=torch.float64)
        return _compare_tensors(number, torch.tensor(want, dtype=torch.float64), what, world_size)
    else:
        same = type(got) is type(want) and got == want
        wanted = "None" if want is None else describe(want)
        if type(want) is int and type(got) is float and got == want:
            text = f"{what}: expected the whole number {want}, got the float {got}; divide with //, or use int()"
            return Fault("not a whole number", text)
        return None if same else Fault("values", f"{what}: expected {wanted}, got {describe(got)}")
    for name, one, other in pairs:
        fault = compare(one, other, name, world_size)
        if fault is not None:
            is_flat = not isinstance(want, dict) and all(isinstance(item, int | float | str) for item in (*got, *want))
            is_moved = is_flat and Counter(got) == Counter(want)
            also = f"; {what} has the right values in a different order" if is_moved else ""
            return fault._replace(message=fault.message + also)
    return None


def describe(value: Any) -> str:
    """Say in a few words what a value is."""
    if isinstance(value, Tensor):
        return f"a {_dtype(value)} tensor of shape {list(value.shape)}"
    if value is None:
        return "None (is a return missing?)"
    try:
        text = repr(value)
    except Exception as error:  # too deep, say
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return text if len(text) <= 80 else f"a {type(value).__name__}{size}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _form(got: Any, want: Tensor, what: str) -> Fault | None:
    """Say what is wrong before any value is looked at."""
    if not isinstance(got, Tensor):
        return Fault("returned", f"{what}: expected {describe(want)}, got {describe(got)}")
    if got.shape != want.shape:
        alike = got.dtype == want.dtype and got.numel() == want.numel() and equal(got.flatten(), want.flatten())
        also = ": these are the right values, in a different shape" * (alike and got.numel() > 0)
        return Fault("shape", f"{what}: expected shape {list(want.shape)}, got {list(got.shape)}{also}")
    if got.dtype != want.dtype:
        return Fault("dtype", f"{what}: expected dtype {_dtype(want)}, got {_dtype(got)}")
    if got.device != want.device:
        return Fault("device", f"{what}: expected it on {want.device}, got it on {got.device}")
    if got.layout != want.layout:
        return Fault("layout", f"{what}: expected a {want.layout} tensor, got a {got.layout} one")
    if bool(got.isnan().any()) and not bool(want.isnan().any()):
        return Fault("nan", f"{what} has {int(got.isnan().sum())} NaN of {got.numel()}")
    return None


def _compare_tensors(got: Tensor, want: Tensor, what: str, world_size: int) -> Fault | None:
    if equal(got, want):
        return None
    ratio = constant_ratio(got, want)
    if ratio is not None:
        code, advice = what_a_factor_shows(ratio, world_size)
        both = "" if got.numel() > 1 else " (expected {}, got {})".format(*apart(want.item(), got.item()))
        return Fault(code, f"{what} is {times_of(ratio)}{both}{advice}")
    if got.numel() > 1 and not bool(got.any()):
        return Fault("zeros", f"{what} is all zeros")
    order = _order(got, want)
    if order is not None:
        return Fault("order", f"{what} has the right values in the wrong order: {order}")
    return Fault("values", _first_difference(got, want, what))


def equal(got: Tensor, want: Tensor) -> bool:
    """Whether two tensors of one shape are equal up to the tolerance of their dtype, relative to the largest value."""
    if torch.equal(got, want) or not got.is_floating_point():
        return torch.equal(got, want)
    finite = want[want.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(got, want, rtol=0.0, atol=tolerance_of(want.dtype) * max(scale, 1e-300), equal_nan=True)


def near(got: Any, want: Any, scale: float = 0.0) -> bool:
    """Whether two results are equal up to the roundings of their dtype.

    Args:
        got: what there is.
        want: what was expected.
        scale: size of the numbers that they came from, where those may be larger than the results.
    """
    if isinstance(want, Tensor) and isinstance(got, Tensor):
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
    if isinstance(value, Tensor):
        return value.numel() > (0 if value.is_floating_point() else 3) and bool(value.any())
    if isinstance(value, dict | list | tuple):
        return any(map(is_telling, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and math.isfinite(value) and value != round(value)


def in_python_numbers(value: Any, depth: int = 20) -> Any:
    """Return a value with Python's numbers for numpy's: np.int64(8) is 8; what holds none is returned itself."""
    if not depth:  # a list may hold itself
        return value
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, complex, str):
        return value.item()
    if type(value) in (list, tuple):
        items = [in_python_numbers(item, depth - 1) for item in value]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        return value if is_same else type(value)(items)
    if type(value) is dict:
        pairs = {in_python_numbers(key): in_python_numbers(item, depth - 1) for key, item in value.items()}
        is_same = all(new is old for new, old in zip([*pairs, *pairs.values()], [*value, *value.values()], strict=True))
        return value if is_same else pairs
    return value


def whole(value: Any) -> Any:
    """Return a whole number as an int, and what is none as it is: 12.5 does not count as 12."""
    return int(value) if value % 1 == 0 else value


def constant_ratio(got: Tensor, want: Tensor) -> float | None:
    """Return the factor, other than 1, between two tensors of one shape; None where it is not the same everywhere."""
    if got.numel() == 0 or not bool(want.any()) or not bool(got.any()) or got.dtype == torch.bool:
        return None
    one, other = got.to(torch.float64).flatten(), want.to(torch.float64).flatten()
    ratio = float(one @ other / (other @ other))
    if not math.isfinite(ratio) or ratio == 0 or abs(ratio - 1) < 1e-6:
        return None
    tolerance = max(tolerance_of(got.dtype), 1e-7)  # float32 on the way hides no ratio
    fits = float((one - ratio * other).abs().max()) <= 10 * tolerance * float(one.abs().max())
    # One number's ratio tells something where it is a small whole number or its inverse.
    is_simple = any(1.5 < abs(x) < 64.5 and abs(x - round(x)) < 1e-6 for x in (ratio, 1 / ratio))
    return ratio if fits and (got.numel() > 1 or is_simple) else None


def what_a_factor_shows(ratio: float, n: int, *, is_mean: bool = True) -> tuple[str, str]:
    """Return the code of a wrong factor, and what it shows where a mean over n ranks, or else their sum, is right."""
    if n > 1 and is_mean and abs(ratio - n) < 1e-5:
        return "sum not mean", f": {SUM_NOT_MEAN.format(n)}"
    if n > 1 and abs(ratio * n - 1) < 1e-5:
        of_sum = "mean not sum", f": it is the mean over ranks, not the sum: do not divide by world_size ({n})"
        return ("divided twice", f": {DIVIDED_TWICE.format(n)}") if is_mean else of_sum
    return "scale", ""


def times_of(ratio: float) -> str:
    """Say by what factor something is wrong."""
    if ratio < 0:
        return f"{ratio:.4g} times what it should be (the sign is wrong)"
    factor, _ = apart(max(ratio, 1 / ratio), 1.0, digits=4)
    return f"{factor}x too {'large' if ratio > 1 else 'small'}"


def _order(got: Tensor, want: Tensor) -> str | None:
    if got.numel() < 2:
        return None
    if got.ndim == 2 and got.shape[0] == got.shape[1] and equal(got, want.T):
        return "it is transposed"
    for dim, size in enumerate(got.shape):
        if size > 1 and equal(got, want.flip(dim)):
            return f"it is reversed along dimension {dim}"
        for shift in range(1, min(size, 64)):
            if equal(got, want.roll(shift, dim)):
                ahead = shift if shift <= size // 2 else shift - size
                return f"it is rolled by {ahead} along dimension {dim}"
    if got.dtype != torch.bool and equal(got.flatten().sort().values, want.flatten().sort().values):
        return "sorted, they agree"
    return None


def _first_difference(got: Tensor, want: Tensor, what: str) -> str:
    gap = (got.to(torch.float64) - want.to(torch.float64)).abs().nan_to_num(nan=math.inf)
    finite = want.to(torch.float64).abs().nan_to_num(0.0, 0.0, 0.0)
    limit = tolerance_of(want.dtype) * (float(finite.max()) if finite.numel() else 0.0)
    wrong = gap > limit
    telling = wrong & (gap >= 1e-3 * gap.max())  # not one that is hardly off where others are far off
    index = [int(i) for i in telling.nonzero()[0]] if bool(wrong.any()) else []
    expected, found = want[tuple(index)].item(), got[tuple(index)].item()
    count = f"{int(wrong.sum())} of {got.numel()} elements differ" if got.numel() > 1 else "it differs"
    place = f"[{', '.join(map(str, index))}]" if index else ""
    expected_text, found_text = apart(expected, found)
    text = f"{what}{place}: expected {expected_text}, got {found_text}; {count}, by up to {float(gap.max()):.3g}"
    return text + _lost_precision(got, want, float(gap.max()))


def apart(one: Any, other: Any, *, digits: int = 6) -> tuple[str, str]:
    """Return two numbers as texts, with as many digits as it takes to tell them apart, `digits` at least."""
    if not isinstance(one, float) or not isinstance(other, float):
        return str(one), str(other)
    texts = [(f"{one:.{count}g}", f"{other:.{count}g}") for count in range(digits, 18)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[-1])


def _lost_precision(got: Tensor, want: Tensor, gap: float) -> str:
    """Say so where the result is right to the digits of a coarser dtype than its own, and only to these; else ""."""
    if got.numel() < 2 or not got.is_floating_point() or not math.isfinite(scale := float(want.abs().max())):
        return ""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if torch.finfo(got.dtype).eps < torch.finfo(dtype).eps:
            only_these = torch.equal(got.to(dtype).to(got.dtype), got)
            limit = 4 if only_these else 16  # roundings of the largest value
            if 0 < gap <= limit * torch.finfo(dtype).eps * scale and (only_these or dtype is torch.float32):
                name, own = str(dtype).removeprefix("torch."), _dtype(got)
                or_else = "" if only_these else ", or another small constant"
                off = f": it is about {gap / scale:.0e} off, relative to the largest"
                return f"{off}: {name} somewhere in a {own} run{or_else}?"
    return ""
