"""How the calls of lesson 13's exercises vary: arguments that are drawn from a seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from distlab_lesson_13.checks.loading import use_balance, use_resume
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


def _draw_limit(draw: Draw) -> tuple[Any, ...]:
    heavy, slow, size, ranks = draw.one_of("load", "compute", "wire"), draw.integer(0, 1), draw.one_of(1, 0.001), []
    for rank in range(draw.one_of(1, 2, 3, draw.integer(4, 8))):
        begins, load, compute = draw.number(3, 5), draw.number(1, 9), draw.number(2, 9)
        load += 40 * (heavy == "load" and rank == slow)
        compute += 40 * (heavy == "compute" and rank == slow)
        start = begins + load * draw.one_of(1, draw.number(0, 1))
        ranks.append([(begins, begins + load), (start, start + compute), (start + 0.5, start + compute - 0.5)])
    over = max(own[1][1] for own in ranks) + draw.number(1, 9) + 60 * (heavy == "wire")
    ahead, update = draw.one_of([], [(over - 1, over + 5)]), draw.one_of([], [(over, over + draw.number(1, 5))])
    spans = [
        {"load": [load, *ahead], "compute": [work, inner, *update], "sync": [(work[1], over + draw.number(0, 1))]}
        for load, work, inner in ranks
    ]
    return ([{name: [(size * a, size * b) for a, b in own[name]] for name in own} for own in spans],)


def _draw_resume(draw: Draw) -> tuple[Any, ...]:
    context, files = draw.integer(1, 9), [draw.one_of(0, 1, draw.integer(2, 200)) for _ in range(draw.integer(1, 5))]
    files.append(draw.integer(60, 200))
    samples = (sum(files) - 1) // context
    used = [draw.integer(0, samples // 8) for _ in range(draw.one_of(1, 2, draw.integer(3, 6)))]
    return used, files, context, draw.one_of(8, samples, draw.integer(1, 30)), draw.one_of(1, 2, draw.integer(3, 9))


def _draw_balance(draw: Draw) -> tuple[Any, ...]:
    num_ranks, same = draw.one_of(1, 2, 3, draw.integer(4, 6)), draw.one_of(False, True)
    tokens, count, lengths = draw.integer(60, 200), draw.integer(1, 6), []
    for _ in range(num_ranks):  # a batch that can be shared out evenly
        cuts = sorted(draw.integer(1, tokens - 1) for _ in range((count if same else draw.integer(1, 6)) - 1))
        lengths += [end - start for start, end in zip([0, *cuts], [*cuts, tokens], strict=True) if same or end > start]
    return sorted(lengths, key=lambda _: draw.number(0, 1)), num_ranks, same


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
vary_limit, vary_resume = Vary(_draw_limit, num_calls=24), Vary(_draw_resume, use=use_resume, num_calls=24)
vary_balance = Vary(_draw_balance, use=use_balance, num_calls=24)
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
