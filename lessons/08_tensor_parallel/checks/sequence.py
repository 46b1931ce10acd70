"""The pair that joins and sums a sequence in parts, and dropout: common masks where ranks hold the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_08.checks.shared import ACTIVATION, CUT, HIDDEN, POSITIONS, SAMPLES, reduce_bytes, use_two
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls, sent_line
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

DROPPED, DROP_SEEDS, DROP_SHAPE = 0.3, (7, 8, 14), (200, 10)  # 14 is twice 7, for those who multiply by the rank
SHARES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)


def _sequence_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    lengths = {"own": 1, "gradient of the whole": n, "partial": n, "gradient of the part": 1}
    of = {name: seeded(rank, POSITIONS // n * times, SAMPLES, HIDDEN, purpose=name) for name, times in lengths.items()}
    return {"": tuple(of.values())}


def use_sequence(
    fn: Callable[..., Any], part: Tensor, grad_of_whole: Tensor, whole: Tensor, grad_of_part: Tensor
) -> Any:
    """Go through both functions and back."""
    return use_two(fn, ("the first", "the second"), (part, grad_of_whole), (whole, grad_of_part))


def use_drop(fn: Callable[..., Any], x: Tensor, p: float, seeds: list[int], is_split: bool) -> dict[str, Any]:
    """Return what holds for every right mask: what stays, how many are dropped, and who drops the same."""
    ones = torch.ones(DROP_SHAPE, dtype=x.dtype)
    got = fn(x, p, seeds[0], is_split)
    if isinstance(got, Tensor) and got.shape == x.shape:
        got = torch.where(got != 0, got / x, torch.full_like(got, 1 / (1 - p)))
    own = torch.stack([_kept(fn(ones, p, seed, is_split)) for seed in seeds])
    common = [(f"seed {seed}", _kept(fn(ones, p, seed, False))) for seed in seeds if is_split]
    again = _kept(fn(ones, p, seeds[0], is_split))
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    ranks, mask = enumerate(everyone if is_split else everyone[:1]), own[0]
    drawn = [
        (f"seed {seed} on rank {rank}", one) for rank, each in ranks for seed, one in zip(seeds, each, strict=True)
    ]
    dropped = 1 - float(mask.float().mean())
    return {
        "what stays, divided by x": got,
        "the share that is dropped, in steps": min(SHARES, key=lambda share: abs(share - dropped)),
        "a whole row or column is dropped or stays": any(bool((mask == one).all()) for one in (mask[:, :1], mask[:1])),
        "the same call drops the same": torch.equal(mask, again),
        "all ranks drop the same": all(torch.equal(each[0], mask) for each in everyone),
        "masks that are equal": _equal(combinations(drawn, 2)),
        "masks that are also those of is_split=False": _equal(product(drawn, common)),
    }


def _equal(pairs: Iterable[tuple[tuple[str, Tensor], tuple[str, Tensor]]]) -> str:
    return next((f"{name} and {other}" for (name, one), (other, two) in pairs if torch.equal(one, two)), "none")


def _kept(got: Any) -> Tensor:
    """Return what stays of ones; of what is no tensor of their shape, nothing does."""
    is_one = isinstance(got, Tensor) and got.shape == DROP_SHAPE
    return (got != 0).to(torch.uint8) if is_one else torch.zeros(DROP_SHAPE, dtype=torch.uint8)


def _drop_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    ones = torch.ones(40, 10, dtype=torch.float64)
    return {f"is_split={is_split}": (ones, DROPPED, list(DROP_SEEDS), is_split) for is_split in (False, True)}


drive_sequence = Cases(_sequence_cases, use_sequence, needs="two all-gathers and two reduce-scatters")
drive_dropout = Cases(_drop_cases, use_drop, most_bytes=0)


def budget_sequence(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    wanted = 2 * reduce_bytes(ACTIVATION, evidence.world_size)
    return [sent_line(evidence, wanted, "f and g with all-reduces")]


def budget_dropout(evidence: Evidence) -> list[str]:
    """Say that nothing was sent, but for the masks that the check compares."""
    made = sum(len(calls(evidence, rank)) - len(evidence.results[rank]) for rank in range(evidence.world_size))
    return [f"{made} calls: masks need no communication"]


_CHUNK = "chunk(dist.get_world_size())[dist.get_rank()]"
_SEED = 'derive_seed(seed, dist.get_rank(), "split") if is_split else derive_seed(seed, 0, "whole")'
_COLLIDE = "sums or products as seeds collide; derive_seed(seed, rank, purpose) mixes them"
_ADD_UP, _JOIN = "return add_up(gradient)", "return join(gradient)"

WRONG_SEQUENCE = (
    Mutant(
        "own positions",
        "not summed back",
        "the first's backward keeps the own positions of this rank's gradient: sum over ranks, then keep the own",
        2,
    ).edit(_ADD_UP, f"return gradient.{_CHUNK}.clone()"),
    Mutant(
        "zeros",
        "not joined back",
        "the second's backward has zeros for others' positions: each rank made a part of all of them; all-gather them",
        2,
    ).edit(
        _JOIN,
        f"""
        whole = gradient.new_zeros(len(gradient) * dist.get_world_size(), *gradient.shape[1:])
        whole.{_CHUNK}.copy_(gradient)
        return whole
        """,
    ),
    Mutant(
        "own result", "not summed", "the second keeps its positions of its own partial result; sum over ranks", 2
    ).edit("return add_up(x)", f"return x.{_CHUNK}.clone()"),
    Mutant(
        "all-reduce", "all-reduce", "all positions are summed on every rank; scatter_sum is the half that you need", 2
    ).edit("scatter_sum(whole.view(-1), part.view(-1))", f"dist.all_reduce(whole)\npart = whole.{_CHUNK}.clone()"),
    Mutant("mean", "mean not sum", "the first's backward gives the mean; parts of a gradient are added up", 2, 33).edit(
        _ADD_UP, "return add_up(gradient) / dist.get_world_size()"
    ),
    Mutant(
        "joined and summed", "gradient t times", "the second's backward adds up what it joined: all-gather alone", 2
    ).edit(_JOIN, "whole = join(gradient)\ndist.all_reduce(whole)\nreturn whole"),
    Mutant("dealt out", "dealt out", "positions are dealt out one by one: rank r keeps the r-th piece of the sum", 2)
    .setup("n = dist.get_world_size")
    .edit("whole.contiguous().clone()", "torch.cat([whole[r :: n()] for r in range(n())])"),
    Mutant(
        "swapped", "swapped", "the first makes it shorter, the second joins it: return them the other way round", 2
    ).edit("Gather.apply, ReduceScatter.apply", "ReduceScatter.apply, Gather.apply"),
    Mutant("cut", "graph cut", f"through the first {CUT}; write an autograd Function", 1, 32).edit(
        "return Gather.apply,", "return lambda x: Gather.apply(x.detach()),"
    ),
    Mutant("a part as it lies", "raised", "contiguous", 2, "one layout").edit("part.contiguous()", "part"),
    Mutant("sum kept", "kept", "make a new tensor", preamble="_kept = {}").edit(
        "return part", "return _kept.setdefault((part.shape, part.dtype), part).copy_(part)"
    ),
)
WRONG_DROPOUT = (
    Mutant(
        "same everywhere",
        "split, masks equal",
        "ranks have the same mask for different numbers: the pattern repeats along the tensor; derive the seed by rank",
        2,
        39,
    ).edit(_SEED, 'derive_seed(seed, 0, "dropout")'),
    Mutant(
        "different everywhere",
        "whole, masks differ",
        "ranks drop different numbers of what all hold: their copies drift apart; all draw with the same seed",
        2,
        39,
    ).edit(_SEED, 'derive_seed(seed, dist.get_rank(), "dropout")'),
    Mutant("seed + rank", "seeds collide", _COLLIDE, 2, 39).edit(_SEED, "seed + is_split * dist.get_rank()"),
    Mutant("seed x rank", "seeds collide", _COLLIDE, 2).edit(_SEED, "seed * (dist.get_rank() + 1 if is_split else 1)"),
    Mutant(
        "one purpose",
        "split equals whole",
        "a mask of an own part is also the one that all ranks draw for what they hold: derive them for two purposes",
        1,
    ).edit(_SEED, 'derive_seed(seed, is_split * dist.get_rank(), "dropout")'),
    Mutant("seed not used", "same every step", "every step drops the same numbers: use `seed`").edit(
        _SEED, 'derive_seed(0, dist.get_rank() * is_split, f"{is_split}")'
    ),
    Mutant("no seed", "not repeatable", "recomputed activations would not be those of forward: seed a generator").edit(
        "manual_seed(own)", "manual_seed(torch.Generator().seed())"
    ),
    Mutant("torch's generator", "state left behind", "torch's random state", 2, 39)
    .edit("kept = ", "torch.manual_seed(own)\nkept = ")
    .without(", generator=torch.Generator().manual_seed(own)"),
    Mutant("not scaled", "not scaled", "what stays is as before: divide it by 1 - p").without(" / (1 - p)"),
    Mutant("divided by p", "divided by p", "what stays is divided by p: divide it by 1 - p").edit("/ (1 - p)", "/ p"),
    Mutant(
        "turned", "is_split turned", "masks are the ranks' own where all hold the same x: is_split is turned round", 2
    ).edit("if is_split", "if not is_split"),
    Mutant("keeps p", "keeps p", "p is the probability of dropping, not of keeping").edit(">= p", "< p"),
    Mutant("rows dropped", "rows dropped", "each number is dropped by itself: draw torch.rand(x.shape)").edit(
        "torch.rand(x.shape,", "torch.rand(x.shape[:1] + (1,) * (x.dim() - 1),"
    ),
    Mutant("a quarter", "scale", "the share that is dropped", seen="one set of arguments").edit(
        "own = ", "p = 0.3\nown = "
    ),
    Mutant("float64 written down", "dtype", "expected dtype").edit("kept.to(x.device)", "kept.double()"),
)
