"""The pair that joins and sums a sequence in parts, and dropout: common masks where ranks hold the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_08.checks.shared import (
    ACTIVATION,
    HIDDEN,
    POSITIONS,
    SAMPLES,
    is_times,
    judge_way,
    one_way,
    plain,
    reduce_bytes,
    total,
)
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.traffic import calls, over_budget, sent_line
from distlab.grading.diagnosis.values import compare, describe, equal, same, seeded

DROPPED, DROP_SEEDS, DROP_SHAPE = 0.25, (7, 8, 14), (40, 10)  # 14 is twice 7, for those who multiply by the rank


def sequence_of(rank: int, purpose: str, length: int) -> Tensor:
    """Return a rank's numbers, the sequence as the first dim."""
    return seeded(rank, length, SAMPLES, HIDDEN, purpose=purpose)


def drive_sequence(fn: Callable[[], Any]) -> dict[str, Any]:
    """Send something through each of the pair."""
    pair = fn()
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(callable(one) for one in pair):
        return {"pair": pair if not callable(pair) else "a function"}
    rank, length = dist.get_rank(), POSITIONS // dist.get_world_size()
    gather = one_way(pair[0], sequence_of(rank, "own", length), sequence_of(rank, "gradient of the whole", POSITIONS))
    scatter = one_way(
        pair[1], sequence_of(rank, "partial", POSITIONS), sequence_of(rank, "gradient of the part", length)
    )
    return {"gather": gather, "scatter": scatter}


def judge_sequence(evidence: Evidence) -> Iterator[Fault]:
    """All-gather forward and reduce-scatter backward, and the reverse: together the bytes of two all-reduces."""
    n, length = evidence.world_size, POSITIONS // evidence.world_size

    def all_of(purpose: str, size: int) -> list[Tensor]:
        return [sequence_of(rank, purpose, size) for rank in range(n)]

    joined = torch.cat(all_of("own", length))
    back = total(all_of("gradient of the whole", POSITIONS)).split(length)
    added = total(all_of("partial", POSITIONS)).split(length)
    gradient = torch.cat(all_of("gradient of the part", length))
    for rank, result in enumerate(evidence.results):
        if "pair" in result:
            yield Fault("returned", f"rank {rank}: expected two functions, got {describe(result['pair'])}")
        gather, scatter = result["gather"], result["scatter"]
        if n > 1:
            yield from _judge_gather(gather, scatter, back[rank], rank, n)
            yield from _judge_scatter(scatter, gradient, rank, n)
        yield from judge_way(gather, (joined, back[rank]), f"the first function on rank {rank}", n)
        yield from judge_way(scatter, (added[rank], gradient), f"the second function on rank {rank}", n)
    wanted = 4 * (n - 1) / n * ACTIVATION
    fault = over_budget(evidence, wanted, "two all-gathers and two reduce-scatters")
    if fault is not None and calls(evidence, 0, "all_reduce"):
        text = f"{fault.message}: an all-reduce sums all positions on every rank, and all but 1/{n} of them are thrown"
        yield Fault("all-reduce", f"{text} away; scatter_sum is the half that you need")
    yield from found(fault)


def _judge_gather(
    gather: dict[str, Any], scatter: dict[str, Any], summed: Tensor, rank: int, n: int
) -> Iterator[Fault]:
    lengths = [len(way["out"]) if isinstance(way["out"], Tensor) else 0 for way in (gather, scatter)]
    if lengths == [POSITIONS // n**2, POSITIONS * n]:
        text = "the first makes a sequence shorter and the second makes it longer; the first takes the place of f"
        yield Fault("swapped", f"{text}: it joins what the ranks hold. Return them the other way round")
    if same(gather["grad"], sequence_of(rank, "gradient of the whole", POSITIONS).chunk(n)[rank]):
        text = f"rank {rank}: backward of the first keeps the own positions of this rank's gradient, without a sum"
        text += ": the other ranks worked with these positions too; sum over ranks, then keep the own"
        yield Fault("not summed back", text)
    if same(gather["grad"], summed / n):
        text = f"rank {rank}: backward of the first gives the mean over ranks"
        yield Fault("mean not sum", f"{text}; each rank has a part of one gradient, and parts are added up")


def _judge_scatter(scatter: dict[str, Any], every: Tensor, rank: int, n: int) -> Iterator[Fault]:
    if same(scatter["out"], sequence_of(rank, "partial", POSITIONS).chunk(n)[rank]):
        text = f"rank {rank}: the second keeps its positions of its own partial result; the output is the ranks' sum"
        yield Fault("not summed", text)
    alone = torch.zeros_like(every)
    alone.chunk(n)[rank].copy_(every.chunk(n)[rank])
    if same(scatter["grad"], alone):
        text = f"rank {rank}: backward of the second has zeros for the others' positions: every rank's part of the"
        yield Fault("not joined back", f"{text} work made all positions, so it needs all gradients; all-gather them")
    if is_times(scatter["grad"], every, n):
        text = f"rank {rank}: backward of the second gives {n} times the gradient: joined on every rank, and added up"
        yield Fault("gradient t times", f"{text} as well")


def budget_sequence(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    wanted = 2 * reduce_bytes(ACTIVATION, evidence.world_size)
    return [sent_line(evidence, wanted, "f and g with all-reduces")]


def drive_drop(fn: Callable[[Tensor, float, int, bool], Any]) -> dict[str, Any]:
    """Drop numbers with each seed twice, in both regions; look at torch's own generator before and after."""
    ones = torch.ones(DROP_SHAPE, dtype=torch.float64)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    got = {
        (is_split, seed): [plain(fn(ones, DROPPED, seed, is_split)) for _ in range(2)]
        for is_split in (False, True)
        for seed in DROP_SEEDS
    }
    return {"got": got, "state": torch.equal(state, torch.get_rng_state()), "kept": bool((ones == 1).all())}


def judge_drop(evidence: Evidence) -> Iterator[Fault]:
    """Common masks where ranks hold the same, independent ones where they do not; from the seed and nothing else."""
    masks: list[dict[tuple[bool, int], Tensor]] = []
    for rank, result in enumerate(evidence.results):
        fault = _judge_values(result, rank)
        yield from found(fault)
        masks.append({key: pair[0] != 0 for key, pair in result["got"].items()})
    yield from _judge_masks(masks)
    for rank, result in enumerate(evidence.results):
        if not result["state"]:
            text = f"rank {rank}: right masks, but torch's own generator has moved: what draws from it next, such as"
            yield Fault(
                "generator moved", f"{text} nn.Dropout, differs between ranks. Use a torch.Generator of its own"
            )


def _judge_values(result: dict[str, Any], rank: int) -> Fault | None:
    for (is_split, seed), pair in result["got"].items():
        what = f"rank {rank}, is_split={is_split}, seed {seed}"
        ones = torch.ones(DROP_SHAPE, dtype=torch.float64)
        for got in pair:
            if not isinstance(got, Tensor) or got.shape != ones.shape:
                return Fault("returned", f"{what}: expected a tensor of shape {list(ones.shape)}, got {describe(got)}")
        kept = pair[0][pair[0] != 0]
        share = 1 - kept.numel() / ones.numel()
        if len(kept) and equal(kept, torch.ones_like(kept)):
            text = f"{what}: what stays is as before; divide it by 1 - p = {1 - DROPPED}"
            return Fault("not scaled", f"{text}, or activations are smaller in training than later")
        if abs(share - (1 - DROPPED)) < 0.1:
            return Fault("keeps p", f"{what}: {share:.0%} are dropped; p is the probability of dropping")
        if abs(share - DROPPED) > 0.1:
            return Fault("share", f"{what}: {share:.0%} are dropped, expected about {DROPPED:.0%}")
        if (fault := compare(kept, torch.full_like(kept, 1 / (1 - DROPPED)), f"{what}: what stays")) is not None:
            return fault
        mask = pair[0] != 0
        if bool((mask == mask[:, :1]).all()) or bool((mask == mask[:1]).all()):
            text = f"{what}: a row, or a column, is dropped whole or stays whole; each number is dropped by itself"
            return Fault("rows dropped", f"{text}: draw as many numbers as x has, torch.rand(x.shape)")
        if not torch.equal(*pair):
            text = f"{what}: the same call twice gives two masks: recomputed activations would not be those of forward"
            return Fault("not repeatable", f"{text}; draw from a generator that is seeded with `seed`")
    return None


def _judge_masks(masks: list[dict[tuple[bool, int], Tensor]]) -> Iterator[Fault]:
    first, second, *_ = DROP_SEEDS
    for rank, mask in enumerate(masks[1:], start=1):
        if not torch.equal(mask[False, first], masks[0][False, first]):
            text = f"is_split=False: ranks 0 and {rank} drop different numbers of what both hold"
            yield Fault("whole, masks differ", f"{text}: their copies drift apart. All draw with the same seed")
        if torch.equal(mask[True, first], masks[0][True, first]):
            text = f"is_split=True: ranks 0 and {rank} have the same mask, for different numbers"
            yield Fault("split, masks equal", f"{text}: the pattern repeats along the tensor. Derive the seed by rank")
    for rank, mask in enumerate(masks):
        for is_split in (False, True):
            if torch.equal(mask[is_split, first], mask[is_split, second]):
                text = f"rank {rank}: seeds {first} and {second} give the same mask"
                yield Fault("same every step", f"{text}: every step drops the same numbers; use `seed`")
    drawn = [(seed, rank, mask[True, seed]) for rank, mask in enumerate(masks) for seed in DROP_SEEDS]
    for (seed, rank, mask), (other_seed, other, again) in combinations(drawn, 2):
        if torch.equal(mask, again):
            text = f"seed {other_seed} on rank {other} is seed {seed} on rank {rank}: sums or products as seeds collide"
            yield Fault("seeds collide", f"{text}; derive_seed(seed, rank, purpose) mixes them")
    for seed, (rank, mask) in product(DROP_SEEDS, enumerate(masks)):
        common = [other for other in DROP_SEEDS if torch.equal(mask[True, seed], mask[False, other])]
        if common:
            text = (
                f"rank {rank}: the mask of its own part with seed {seed} is the one that all ranks draw for what they"
            )
            text += f" hold in common, with seed {common[0]}: one layer drops the same places as another"
            yield Fault("split equals whole", f"{text}. Derive the two seeds for different purposes")


def budget_drop(evidence: Evidence) -> list[str]:
    """Say that nothing was sent."""
    made = sum(len(calls(evidence, rank)) for rank in range(evidence.world_size))
    return [f"{made} calls: masks need no communication"]


_OWN = "chunk(dist.get_world_size())[dist.get_rank()]"
_SEED = 'derive_seed(seed, dist.get_rank(), "split") if is_split else derive_seed(seed, 0, "whole")'

WRONG_SEQUENCES = (
    Mutant("own positions", "not summed back", "sum over ranks", 2).edit(
        "return add_up(gradient)", f"return gradient.{_OWN}.clone()"
    ),
    Mutant("zeros", "not joined back", "all-gather them", 2).edit(
        "return join(gradient)",
        f"""
        whole = gradient.new_zeros(len(gradient) * dist.get_world_size(), *gradient.shape[1:])
        whole.{_OWN}.copy_(gradient)
        return whole
        """,
    ),
    Mutant("own result", "not summed", "the ranks' sum", 2).edit("return add_up(x)", f"return x.{_OWN}.clone()"),
    Mutant("all-reduce", "all-reduce", "the half that you need", 2).edit(
        "scatter_sum(whole.view(-1), part.view(-1))", f"dist.all_reduce(whole)\npart = whole.{_OWN}.clone()"
    ),
    Mutant("mean", "mean not sum", "parts are added up", 3, 33).edit(
        "return add_up(gradient)", "return add_up(gradient) / dist.get_world_size()"
    ),
    Mutant("swapped", "swapped", "the other way round", 2).edit(
        "Gather.apply, ReduceScatter.apply", "ReduceScatter.apply, Gather.apply"
    ),
    Mutant("cut", "graph cut", "it has no history", 2, 32).edit(
        "return Gather.apply,", "return lambda x: Gather.apply(x.detach()),"
    ),
)
WRONG_DROPS = (
    Mutant("same everywhere", "split, masks equal", "repeats along the tensor", 2, 39).edit(
        _SEED, 'derive_seed(seed, 0, "dropout")'
    ),
    Mutant("different everywhere", "whole, masks differ", "copies drift apart", 2, 39).edit(
        _SEED, 'derive_seed(seed, dist.get_rank(), "dropout")'
    ),
    Mutant("seed + rank", "seeds collide", "derive_seed", 2, 39).edit(_SEED, "seed + is_split * dist.get_rank()"),
    Mutant("seed x rank", "seeds collide", "seed 14 on rank 0", 2).edit(
        _SEED, "seed * (dist.get_rank() + 1 if is_split else 1)"
    ),
    Mutant("one purpose", "split equals whole", "different purposes", 2).edit(
        _SEED, 'derive_seed(seed, is_split * dist.get_rank(), "dropout")'
    ),
    Mutant("torch's generator", "generator moved", "of its own", 2, 39)
    .edit("kept = ", "torch.manual_seed(own)\nkept = ")
    .without(", generator=torch.Generator().manual_seed(own)"),
    Mutant("not scaled", "not scaled", "divide it by 1 - p", 1).without(" / (1 - p)"),
)
