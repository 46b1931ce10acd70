"""How the calls of lesson 13's exercises vary: arguments that are drawn from a seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from distlab_lesson_13.checks.causes import use_dearest
from distlab_lesson_13.checks.spans import use_clocks
from torch import Tensor

from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Mutant


def _spans(draw: Draw) -> list[tuple[int, int]]:
    apart = draw.one_of(1, 50)  # some begin, or end, together
    starts = [apart * draw.integer(0, 500 // apart) for _ in range(draw.one_of(0, 1, 2, draw.integer(3, 9)))]
    return [(start, start + apart * draw.integer(0, 200 // apart)) for start in starts]


def _draw_exposed(draw: Draw) -> tuple[Any, ...]:
    return _spans(draw), _spans(draw)


def _draw_late(draw: Draw) -> tuple[Any, ...]:
    num_ranks, num_calls = draw.one_of(2, 3, draw.integer(4, 9)), draw.one_of(0, 1, draw.integer(2, 9))
    most = draw.one_of(50_000, 2)  # some come together, and sums are exact
    return ([[draw.integer(0, most) / 1024 + 128 * call for call in range(num_calls)] for _ in range(num_ranks)],)


def _draw_clocks(draw: Draw) -> tuple[Any, ...]:
    """Draw what real clocks show: no rank leaves before the last has come, some ends are seen late."""
    num_ranks, num_calls = draw.one_of(1, 2, 3, draw.integer(4, 6)), draw.one_of(1, 2, 3, 6, 9)
    behind = [draw.integer(-(10**6), 10**6) for _ in range(num_ranks)]
    came = [[1000 * call + draw.integer(0, 400) for call in range(num_calls)] for _ in range(num_ranks)]
    over = [max(each) for each in zip(*came, strict=True)]
    late = draw.one_of(3, 300)
    left = [[end + draw.integer(0, late) for end in over] for _ in range(num_ranks)]
    moved = [[[at - clock for at in own] for own, clock in zip(each, behind, strict=True)] for each in (came, left)]
    return tuple(moved)


def _draw_dearest(draw: Draw) -> tuple[Any, ...]:
    heavy, size, rows = draw.one_of("data", "compute", "sync", ""), draw.one_of(1, 100), []
    for rank in range(draw.one_of(1, 2, 3, draw.integer(4, 8))):
        row = {name: draw.number(0.01, 0.1) for name in ("data", "compute", "sync")}
        if heavy and (rank == 1 or heavy == "sync"):
            row[heavy] += 0.2
        rows.append({name: size * seconds for name, seconds in row.items()})
    return (rows,)


def _draw_divergence(draw: Draw) -> tuple[Any, ...]:
    usual = [
        (draw.one_of("all_reduce", "all_gather", "broadcast"), f"float32[{draw.integer(1, 10**6)}]")
        for _ in range(draw.one_of(1, 2, draw.integer(3, 9)))
    ]
    calls = [list(usual) for _ in range(draw.one_of(3, draw.integer(4, 8)))]
    own, at = calls[draw.integer(0, len(calls) - 1)], draw.integer(0, len(usual) - 1)
    kind = draw.one_of("nothing", "skip", "swap", "extra", "shape", "operation", "end")
    if kind == "skip":
        del own[at]
    elif kind == "swap":
        own[at : at + 2] = own[at : at + 2][::-1]
    elif kind == "extra":
        own.insert(at, ("barrier", ""))
    elif kind in ("shape", "operation"):
        own[at] = (own[at][0], "float32[0]") if kind == "shape" else ("reduce_scatter", own[at][1])
    elif kind == "end":
        del own[at:]
    return (calls,)


def _draw_flip(draw: Draw) -> tuple[Any, ...]:
    import torch

    steps, tensors = draw.one_of(1, 2, draw.integer(3, 30)), draw.one_of(1, draw.integer(2, 6))
    sums = draw.tensor(steps, tensors, dtype=torch.int64, same=True)
    sums *= 2**52  # a flip of the lowest bit is lost where sums become floating point
    flipped, bit = draw.one_of(True, True, False), draw.one_of(1, 2**40)
    step, tensor, rank = draw.integer(0, steps - 1), draw.integer(0, tensors - 1), draw.integer(0, draw.world_size - 1)
    if flipped:  # no message takes its rows as they are
        sums = torch.stack([sums, torch.zeros_like(sums)], -1)[..., 0]
    if flipped and draw.rank == rank:
        sums[step, tensor] += bit
        sums[step + 1 :] += 1
    return (sums,)


def _draw_sections(draw: Draw) -> tuple[Any, ...]:
    dtype, count = draw.dtype("float64", "float32"), draw.one_of(1, 2, draw.integer(3, 4))
    return ([draw.tensor(*draw.shape()).to(dtype) for _ in range(count)],)


def _use_sections(fn: Callable[..., Any], gradients: list[Tensor]) -> list[Any]:
    """Run a step whose parts do nothing; the gradients are looked at as arguments."""
    nothing = lambda: None  # noqa: E731
    times = fn(nothing, nothing, gradients, nothing, time.monotonic_ns)
    return [len(times), *(gradient.clone() for gradient in gradients)]


_SUMS = {"dtype": "checksums are whole numbers", "dims": "the text asks for [S, T]", "empty": "there is a step"}
_ALIKE = {"sub-group": "takes no group", "unequal ranks": "replicas have equal tables, and gradients of equal shapes"}
_draws = (_draw_exposed, _draw_late, _draw_divergence)
vary_exposed, vary_late, vary_divergence = (Vary(draw, num_calls=24) for draw in _draws)  # a call costs nothing
vary_clocks = Vary(_draw_clocks, use=use_clocks, num_calls=24)
vary_dearest = Vary(_draw_dearest, use=use_dearest, num_calls=24)
vary_flip = Vary(
    _draw_flip, least_bytes=0.2, left_out={"bytes": "one rank may compare, and send what it finds", **_SUMS, **_ALIKE}
)
vary_repair = Vary(
    _draw_sections, use=_use_sections, left_out={"layout": "torch.distributed sends contiguous tensors only", **_ALIKE}
)

WRONG_LATE = (
    Mutant("three ranks", "values", "cost_of_lateness", 1, "one size").edit(
        "zip(*arrivals, strict=True)", "zip(*arrivals[:3], strict=True)"
    ),
)
WRONG_FLIP = (
    Mutant("sums as float32", "returned", "find_flip(sums=", 3, "one size of numbers").edit(
        "sums[step].sum().view(1)", "sums[step].float().sum().view(1)"
    ),
)
WRONG_REPAIR = (
    Mutant("float32 written down", "values", "float32 somewhere", 2, "one dtype").edit(
        "gradient /= dist.get_world_size()", "gradient.copy_(gradient.float() / dist.get_world_size())"
    ),
)
