"""The only place where bytes, seconds, rates and shares change scale or become text; lists in words; widths of numbers.

Inside the simulator a duration is a whole number of nanoseconds and a size a whole number of bytes; a cost model works
in seconds and bytes per second. GB is 1e9 bytes, as on data sheets; GiB is 2**30, as allocators count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from distlab.plan import Plan, Workload
from distlab.plan.sharding import DTYPE_BYTES

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
NS_PER_S = 10**9
LONGEST_NS = 2**53

_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_WORDS = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"))
_SPAN = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"))
_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def to_ns(seconds: float) -> int:
    """Return a duration as whole nanoseconds, rounded to the nearest.

    Raises:
        ValueError: the duration is negative, infinite or not a number, or longer than 104 days: up to 2**53 a float
            holds every whole number of nanoseconds.
    """
    if not (math.isfinite(seconds) and 0 <= seconds < LONGEST_NS / NS_PER_S):
        raise ValueError(f"a duration is {seconds!r} s; pass a finite time >= 0 (at most {LONGEST_NS // NS_PER_S} s)")
    return round(seconds * NS_PER_S)


def to_s(nanoseconds: int) -> float:
    """Return nanoseconds as seconds."""
    return nanoseconds / NS_PER_S


def _digits(value: float) -> str:
    """Write a number with three digits: 999.9 is "1000", where .3g alone writes "1e+03"."""
    return f"{float(f'{value:.3g}'):g}"


def _scaled(value: float, unit: str) -> str:
    for size, prefix in _DECIMAL:
        if abs(value) >= size:
            return f"{_digits(value / size)} {prefix}{unit}"
    return f"{_digits(value)} {unit}"


def format_bytes(num_bytes: float) -> str:
    """Write a size in decimal units with three digits, such as "25 MB"."""
    return _scaled(num_bytes, "B")


def format_bytes_per_s(bytes_per_s: float) -> str:
    """Write a bandwidth, such as "450 GB/s"."""
    return _scaled(bytes_per_s, "B/s")


def format_flops_per_s(flops_per_s: float) -> str:
    """Write a rate of arithmetic, such as "312 TFLOP/s"."""
    return _scaled(flops_per_s, "FLOP/s")


def counted(number: float, noun: str) -> str:
    """Write a number of things: "1 rank", "1,024 ranks", "2 micro-batches"."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def in_words(number: float) -> str:
    """Write a large number as it is said: "100 billion", "1.5 trillion"; below a million with commas: "8,192"."""
    found = next(((size, word) for size, word in _WORDS if number >= size), None)
    return f"{number:,.0f}" if found is None else f"{number / found[0]:,.4g} {found[1]}"


def format_s(seconds: float) -> str:
    """Write a duration with three digits, such as "1.32 ms"."""
    if seconds == 0:
        return "0 s"
    for size, unit in _TIME:
        if abs(seconds) >= size or unit == "ns":
            return f"{_digits(seconds / size)} {unit}"
    raise AssertionError("the smallest unit takes every duration")


def format_span(seconds: float) -> str:
    """Write a time of any length with three digits, such as "38.1 min" or "2.5 days"; below two minutes as seconds."""
    found = next(((size, unit) for size, unit in _SPAN if seconds >= 2 * size), None)
    if found is None:
        return format_s(seconds)
    value = seconds / found[0]
    return f"{value:,.0f} {found[1]}" if value >= 1000 else f"{value:.3g} {found[1]}"


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


class Widths(NamedTuple):
    """Bytes of one element: of a parameter in each of its forms, and of messages; for activations it is a factor.

    Attributes:
        parameter: to compute with.
        gradient: as it is kept until the update.
        master: of the copy for the update, or 0.
        optimizer: state of the optimizer.
        reduce: as it is summed over ranks.
        activations: how much wider than the workload's activations are.
    """

    parameter: int
    gradient: int
    master: int
    optimizer: float
    reduce: int
    activations: float


def widths_of(workload: Workload, plan: Plan) -> Widths:
    """Return the bytes of an element under the plan's precision, or the workload's own where it has none.

    The optimizer's state has the type of what is updated, the master weights or else the parameters, unless it has its
    own.
    """
    own, master = workload.bytes_per_parameter, workload.master_bytes_per_parameter
    precision, state = plan.precision, workload.optimizer_bytes_per_parameter
    if precision is None:
        return Widths(own, own, master, state, own, 1.0)
    compute = DTYPE_BYTES[precision.compute]
    master_now = 4 if precision.has_master_weights else 0
    state_now = state if workload.has_own_state_type else state * (master_now or compute) / (master or own)
    activations = compute / (workload.activation_element_bytes or own)
    gradient, reduce = DTYPE_BYTES[precision.gradients], DTYPE_BYTES[precision.reduce]
    return Widths(compute, gradient, master_now, state_now, reduce, activations)
