"""The norm of gradients that lie on the ranks in three ways: in parts, whole, and in summands."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

SPLIT, WHOLE, PARTIAL = (6, 10), (4,), (5, 3)
LIMITS = {"a limit of a third of the norm": 1 / 3, "a limit of three times the norm": 3.0}


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    """Make gradients that differ in size between ranks, so that no rank's own norm is the mean."""
    split = [[(r + 1) * seeded(r, size, purpose=f"split {size}") for size in SPLIT] for r in range(n)]
    whole = [3 * seeded(-1, size, purpose=f"whole {size}") for size in WHOLE]
    partial = [[2 * seeded(r, size, purpose=f"partial {size}") for size in PARTIAL] for r in range(n)]
    sums = [torch.stack(same).sum(0) for same in zip(*partial, strict=True)]
    norm = float(torch.cat([*chain(*split), *whole, *sums]).norm())
    return {name: (split[rank], whole, partial[rank], factor * norm) for name, factor in LIMITS.items()}


def use_clip(
    fn: Callable[..., Any], split: list[Tensor], whole: list[Tensor], partial: list[Tensor], max_norm: float
) -> dict[str, Any]:
    """Return the norm in the gradients' type; what was scaled in 32 bits at most, for 1e-6 may be added to the norm."""
    given = copy.deepcopy([split, whole, partial])
    kept = [[*gradients] for gradients in given]
    dtype = next((gradient.dtype for gradient in chain(*kept)), torch.float32)
    norm = fn(*given, max_norm)
    if isinstance(norm, float) or (isinstance(norm, Tensor) and norm.numel() == 1):
        norm = torch.tensor(float(norm), dtype=torch.float64).to(dtype)
    scaled = [[one.float() if one.dtype == torch.float64 else one for one in gradients] for gradients in kept]
    lists = dict(zip(("split", "whole", "partial"), scaled, strict=True))
    return {"the norm": norm, **lists, "lengths of the lists": [*map(len, given)]}


drive_clip = Cases(_cases, use_clip, most_bytes=1.15, needs="the sum of the partial gradients and of one number")


def budget_clip(evidence: Evidence) -> list[str]:
    """Say what it cost."""
    made = len(calls(evidence, 0)) // len(LIMITS)
    return [f"{made} all-reduces: the partial gradients, and one number"]


_ADD_PARTIAL, _REDUCE = "for gradient in partial:\n    dist.all_reduce(gradient)", "dist.all_reduce(square)"
_ROOT, _SPLIT = "square.sqrt()", "(gradient.square().sum() for gradient in split)"
_ONCE = "counts once for each rank that holds it: add its squares after the all-reduce"
_OWN = "is of this rank's own part: ranks scale by different factors; all_reduce the squares of `split`"

WRONG_CLIP = (
    Mutant("own", "own part only", f"the norm {_OWN}", 2, 30).without(_REDUCE),
    Mutant("own of all", "own part only", f"the norm {_OWN}, and `partial`", 2, 30)
    .without(_REDUCE)
    .edit(_ADD_PARTIAL, "pass"),
    Mutant("all summed", "whole counted t times", f"what every rank holds {_ONCE}", 2, 31)
    .edit("in [*whole, *partial])", "in [])")
    .edit("in split)", "in [*split, *whole, *partial])"),
    Mutant("whole in the sum", "whole counted t times", f"`whole` {_ONCE}", 2, 31)
    .edit("in [*whole, *partial])", "in partial)")
    .edit("in split)", "in [*split, *whole])"),
    Mutant("partial in the sum", "partial counted t times", f"`partial` {_ONCE}", 2, 31)
    .edit("in [*whole, *partial])", "in whole)")
    .edit("in split)", "in [*split, *partial])"),
    Mutant(
        "partial as parts",
        "squares of parts",
        "partial gradients are added up first: a sum's square is not the sum of squares",
        2,
    )
    .edit(_ADD_PARTIAL, "pass")
    .edit("in split)", "in [*split, *partial])")
    .edit("in [*whole, *partial])", "in whole)"),
    Mutant(
        "partial forgotten",
        "partial not summed",
        "`partial` has this rank's positions alone: all_reduce it in place",
        2,
        31,
    ).edit(_ADD_PARTIAL, "pass"),
    Mutant("sums in copies", "partial not summed", "the sums of `partial` are in copies: all_reduce it in place", 2)
    .edit(_ADD_PARTIAL, "kept, partial = partial, [gradient.clone() for gradient in partial]\n" + _ADD_PARTIAL)
    .edit("in [*split, *whole, *partial]:", "in [*split, *whole, *kept]:"),
    Mutant("partial left out", "partial left out", "the norm lacks `partial`, whose sums are gradients too").edit(
        "[*whole, *partial])", "whole)"
    ),
    Mutant("whole left out", "whole left out", "the norm lacks `whole`: it counts once, without a sum").edit(
        "[*whole, *partial])", "partial)"
    ),
    Mutant("mean of partial", "mean of partial", "`partial` is averaged; parts of a gradient are added up", 2).edit(
        "dist.all_reduce(gradient)", "dist.all_reduce(gradient)\ngradient /= dist.get_world_size()"
    ),
    Mutant("whole summed", "whole summed", "`whole` is summed over ranks: it is the same gradient on each", 2).edit(
        "in partial:", "in [*partial, *whole]:"
    ),
    Mutant("mean of squares", "averaged", "squares of parts are averaged; all of them count: sum over ranks", 2).edit(
        _REDUCE, f"{_REDUCE}\nsquare /= dist.get_world_size()"
    ),
    Mutant("the largest rank's", "largest rank alone", "MAX takes the largest rank's squares: sum over ranks", 2).edit(
        _REDUCE, "dist.all_reduce(square, dist.ReduceOp.MAX)"
    ),
    Mutant("sum of norms", "norms added", "norms of ranks are added; lengths do not add, their squares do", 2)
    .without(_REDUCE)
    .edit("norm = square.sqrt()", f"norm = square.sqrt()\n{_REDUCE.replace('square', 'norm')}"),
    Mutant("norms of parts", "norms added", "norms of gradients are added; lengths do not add, their squares do")
    .edit("square().sum() for gradient in split", "norm() for gradient in split")
    .edit(_REDUCE, f"square = square.square()\n{_REDUCE}"),
    Mutant("no root", "no root", "it is the sum of squares: take the root").edit(_ROOT, "square"),
    Mutant("norm after", "norm after", "it is the norm after clipping; the one before is asked").edit(
        "return norm", "return norm * factor"
    ),
    Mutant(
        "clip_grad_norm_",
        "gradients of gradients",
        "these tensors are the gradients, and have no .grad, where torch's clip_grad_norm_ looks; sum up their squares",
    ).body("return torch.nn.utils.clip_grad_norm_([*split, *whole, *partial], max_norm)"),
    Mutant("stretches", "scaled up", "below the limit gradients stay as they are: clamp the factor at 1").without(
        ".clamp(max=1.0)"
    ),
    Mutant("a part", "not scaled", "scale all three lists alike, in place").edit(
        "[*split, *whole, *partial]:", "split:"
    ),
    Mutant("all but partial", "not scaled", "`partial` is not scaled: scale all three lists alike, in place").edit(
        "[*split, *whole, *partial]:", "[*split, *whole]:"
    ),
    Mutant("gathers", "gradients gathered", "whole gradients travel, for one number: add up own squares first", 2).edit(
        _REDUCE,
        """
        square = torch.zeros_like(square)
        for gradient in split:
            every = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
            dist.all_gather(every, gradient.contiguous())
            square += sum(one.square().sum() for one in every)
        """,
    ),
    Mutant("zero gradients", "nan", "NaN of", seen="zero gradients").edit(
        "gradient *= factor", "gradient.copy_(gradient / norm * norm.clamp(max=max_norm))"
    ),
    Mutant("a part at least", "raised", "non-empty TensorList", seen="empty lists").edit(
        f"sum({_SPLIT}, torch.zeros((), dtype=torch.float64))",
        "torch.stack([gradient.square().sum().double() for gradient in split]).sum()",
    ),
)
