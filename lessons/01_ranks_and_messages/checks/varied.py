"""How the calls of lesson 1's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from distlab_lesson_01.checks.decisions import use_repair
from distlab_lesson_01.checks.links import use_fit
from torch import Tensor

from distlab.course.grading.exercise import Refused
from distlab.course.grading.variation.draw import Draw, Vary

CONTIGUOUS = {"layout": "torch.distributed sends contiguous tensors only", "sub-group": "takes no group"}
ALIKE = CONTIGUOUS | {"unequal ranks": "all ranks give tensors of one shape"}


def _draw_gather(draw: Draw) -> tuple[Any, ...]:
    return draw.tensor(*draw.shape(), dtype=draw.dtype()), draw.one_of(*range(draw.world_size))


def _draw_ping_pong(draw: Draw) -> tuple[Any, ...] | None:
    ranks = list(range(draw.world_size))
    circle = draw.one_of(ranks, [*ranks[1:], ranks[0]])
    pairs = [circle[start : start + 2] for start in range(0, draw.world_size - 1, 2)]
    tensor = draw.tensor(*draw.shape(), dtype=draw.dtype())
    rounds = draw.integer(1, 5)
    for one, other in pairs:
        if draw.rank in (one, other):
            return tensor, one + other - draw.rank, rounds
    return None


def _use_ping_pong(fn: Callable[[Tensor, int, int], Any], tensor: Tensor, partner: int, rounds: int) -> bool:
    """The seconds differ from run to run: look at whether they are positive, and no more than the call took."""
    start = time.perf_counter()
    seconds = float(fn(tensor, partner, rounds))
    took_s = time.perf_counter() - start
    if seconds * 2 * rounds > 1.02 * took_s + 2e-6:  # another clock may tick otherwise
        text = f"it returns {seconds * 1e6:.0f} us; {rounds} rounds took {took_s * 1e6:.0f} us together, so a message"
        each = f"took {took_s / (2 * rounds) * 1e6:.0f} us at most"
        raise Refused("too long", f"{text} {each}: divide by 2 * rounds, the number of messages")
    return seconds > 0


def _draw_fit(draw: Draw) -> tuple[Any, ...]:
    alpha_s, beta = 10 ** draw.number(-6, -4), 10 ** draw.number(8, 11)
    noise = draw.one_of(0.0, 0.08)
    sizes = [float(draw.integer(1, 9) * 10**power) for power in range(3, 3 + draw.integer(3, 5))]
    return sizes, [(alpha_s + size / beta) * (1 + draw.number(-noise, noise)) for size in sizes]


def _draw_repair(draw: Draw) -> tuple[Any, ...]:
    shape, dtype = draw.one_of((), (1,)), draw.dtype("float64", "float32")
    kind = draw.one_of("near", "just as large", "a little larger")
    if kind != "near":  # 12 can be divided by any number of ranks; 12.04 and 12.01 are one when rounded
        above = kind == "a little larger"
        return torch.full(shape, 12.04 if above else 12, dtype=dtype), 12.01 if above else 12.0
    return draw.tensor(*shape, dtype=dtype), draw.number(-0.6, 0.6)


vary_shift = Vary(lambda draw: (draw.tensor(*draw.shape(), dtype=draw.dtype()),), left_out=ALIKE)
vary_gather = Vary(_draw_gather, left_out=ALIKE)
vary_fit = Vary(_draw_fit, use=use_fit, scale=0.0, left_out={"empty": "a line needs two messages"})
vary_ping_pong = Vary(_draw_ping_pong, use=_use_ping_pong, same_messages=True, left_out=CONTIGUOUS)
vary_repair = Vary(
    _draw_repair,
    use=use_repair,
    least_bytes=0.5,
    left_out={"bytes": "one rank may decide, and send a flag of one byte", "sub-group": "takes no group"}
    | dict.fromkeys(("sizes", "dims", "empty", "layout", "unequal ranks"), "a loss is one number"),
)
