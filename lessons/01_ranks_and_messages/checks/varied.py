"""How the calls of lesson 1's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.grading import Mutant
from distlab.grading.exercise import Refused
from distlab.grading.variation.draw import Draw, Vary

CONTIGUOUS = "torch.distributed sends contiguous tensors only"
TAKES_NO_GROUP = "takes no group"
ALIKE = "all ranks give tensors of one shape"


def _draw_shift(draw: Draw) -> tuple[Any, ...]:
    return (draw.tensor(*draw.shape(), dtype=draw.dtype()),)


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
        text = (
            f"it returns {seconds * 1e6:.0f} us; {rounds} rounds took {took_s * 1e6:.0f} us together, so a message took"
        )
        each = f"{took_s / (2 * rounds) * 1e6:.0f} us at most"
        raise Refused("too long", f"{text} {each}: divide by 2 * rounds, the number of messages")
    return seconds > 0


def _draw_fit(draw: Draw) -> tuple[Any, ...]:
    alpha_s, beta = 10 ** draw.number(-6, -4), 10 ** draw.number(8, 11)
    noise = draw.one_of(0.0, 0.08)
    sizes = [float(draw.integer(1, 9) * 10**power) for power in range(3, 3 + draw.integer(3, 5))]
    return sizes, [(alpha_s + size / beta) * (1 + draw.number(-noise, noise)) for size in sizes]


def _use_fit(fn: Callable[[Sequence[float], Sequence[float]], Any], *arguments: Any) -> list[Tensor]:
    """Compare to five digits: there are several ways to solve for the line."""
    return [torch.tensor(float(number), dtype=torch.float32) for number in fn(*arguments)]


def _draw_gather(draw: Draw) -> tuple[Any, ...]:
    return draw.tensor(*draw.shape(), dtype=draw.dtype()), draw.one_of(*range(draw.world_size))


def _draw_should_stop(draw: Draw) -> tuple[Any, ...]:
    shape, dtype = draw.one_of((), (1,)), draw.dtype("float64", "float32")
    kind = draw.one_of("near", "just as large", "a little larger")
    if kind != "near":  # 12 can be divided by any number of ranks; 12.04 and 12.01 are one when rounded
        above = kind == "a little larger"
        return torch.full(shape, 12.04 if above else 12, dtype=dtype), 12.01 if above else 12.0
    return draw.tensor(*shape, dtype=dtype), draw.number(-0.6, 0.6)


SHIFT = Vary(
    _draw_shift,
    left_out={"layout": CONTIGUOUS, "sub-group": TAKES_NO_GROUP, "unequal ranks": ALIKE},
)
PING_PONG = Vary(
    _draw_ping_pong,
    use=_use_ping_pong,
    same_messages=True,
    left_out={"layout": CONTIGUOUS, "sub-group": TAKES_NO_GROUP},
)
FIT = Vary(_draw_fit, use=_use_fit, scale=0.0, left_out={"empty": "a line needs two messages"})
GATHER = Vary(
    _draw_gather,
    left_out={"layout": CONTIGUOUS, "sub-group": TAKES_NO_GROUP, "unequal ranks": ALIKE},
)
SHOULD_STOP = Vary(
    _draw_should_stop,
    use=lambda fn, loss, threshold: bool(fn(loss, threshold)),
    least_bytes=0.5,
    left_out={
        "bytes": "one rank may decide, and send a flag of one byte",
        "sizes": "a loss is one number",
        "dims": "a loss is one number",
        "empty": "a loss is one number",
        "layout": "a loss is one number",
        "sub-group": TAKES_NO_GROUP,
        "unequal ranks": "a loss is one number",
    },
)

WRONG_SHIFTS = (
    Mutant("float64 written down", "mismatch", "the receive that takes it do not fit", 2, "one dtype", races=True).edit(
        "torch.empty_like(tensor)", "torch.empty(tensor.shape, dtype=torch.float64)"
    ),
    Mutant("through float32", "values", "float32 somewhere", 2, "one dtype")
    .edit("torch.empty_like(tensor)", "torch.empty_like(tensor.float())")
    .edit("dist.isend(tensor,", "dist.isend(tensor.float(),")
    .edit("return received", "return received.to(tensor.dtype)"),
    Mutant("buffer kept", "kept", "make a new tensor", 2, "one call", preamble="_kept = {}").edit(
        "received = torch.empty_like(tensor)",
        "received = _kept.setdefault((tensor.shape, tensor.dtype), torch.empty_like(tensor))",
    ),
    Mutant("result kept", "kept", "something is kept", 2, "one call", preamble="_kept = {}").edit(
        "return received", "return _kept.setdefault((tensor.shape, tensor.dtype), received)"
    ),
    Mutant("two dims only", "raised", "not enough values", 1, "one shape").edit(
        "rank, world_size =", "rows, columns = tensor.shape\nrank, world_size ="
    ),
    Mutant("seeds the world", "state left behind", "torch's random state", 1, "state").edit(
        "rank, world_size =", "torch.manual_seed(0)\nrank, world_size ="
    ),
    Mutant("below torch.distributed", "unseen", "neither dist.send nor dist.isend", 2, "unseen calls").body("""
        everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        backend.allgather([everything], [tensor]).wait()
        return everything[dist.get_rank() - 1]
    """),
)
WRONG_PING_PONGS = (
    Mutant("a round less", "too long", "divide by 2 * rounds", 2, "one set of arguments").edit(
        "(2 * rounds)", "(2 * max(rounds - 1, 1))"
    ),
    Mutant("twelve rounds", "wrong number of messages", "use every argument", 2, "one set of arguments").edit(
        "in range(rounds)", "in range(12)"
    ),
)
WRONG_FITS = (
    Mutant("eight messages", "raised", "LinAlgError", 1, "one size").edit("np.ones_like(times)", "np.ones(8)"),
)
WRONG_GATHERS = (
    Mutant("ends only", "returned", "is a return missing", 4, "one set of arguments").edit(
        "rank, world_size", "root = 0 if root == 0 else dist.get_world_size() - 1\nrank, world_size"
    ),
)
WRONG_STOPS = (Mutant("own threshold", "values", "expected", 2, "one set of arguments").edit("< threshold", "< 2.4"),)
