"""Reference solutions of lesson 13: what a trace, a hang and a table of checksums say, as functions of plain lists.

The library's versions are in `distlab.profile` (sections, clocks, findings), `distlab.comm.record` (calls that do not
meet) and `distlab.elastic.votes` (flipped bits).
"""

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor


def exposed_ns(compute: list[tuple[int, int]], calls: list[tuple[int, int]]) -> int:
    """Return how long calls of one rank were under way while it computed nothing.

    Each pair is a start and an end. Both lists are in any order; spans may overlap, lie in one another, or be empty.
    Time in which two calls are under way counts once.
    """
    cuts = [cut for start, end in calls for cut in ((start, 1, 0), (end, -1, 0))]
    cuts += [cut for start, end in compute for cut in ((start, 0, 1), (end, 0, -1))]
    moving, working, before, exposed = 0, 0, 0, 0
    for now, call, work in sorted(cuts):
        if moving > 0 and working == 0:
            exposed += now - before
        moving, working, before = moving + call, working + work, now
    return exposed


def cost_of_lateness(arrivals: list[list[float]]) -> list[float]:
    """Return for each rank how many seconds earlier all calls together would have begun, had it not come last.

    `arrivals[rank][call]` is when a rank came to a collective, which begins when its last rank has come. Without that
    rank it would begin when the last of the others has come. There are two ranks or more.
    """
    costs = [0.0] * len(arrivals)
    for times in zip(*arrivals, strict=True):
        second, last = sorted(times)[-2:]
        costs[times.index(last)] += last - second
    return costs


def clock_offsets(starts: list[list[int]], ends: list[list[int]]) -> list[float]:
    """Return for each rank what to add to its times, to bring them to rank 0's clock.

    `starts[rank][call]` is when the rank came to a collective, `ends[rank][call]` when it left, on its own clock. Ranks
    leave a collective at nearly the same time, so the median difference of ends counts. But no rank leaves before
    a different one has come: where the median would say so, the nearest offset that does not counts.
    """
    offsets = []
    for own_starts, own_ends in zip(starts, ends, strict=True):
        apart = statistics.median(there - here for there, here in zip(ends[0], own_ends, strict=True))
        least = max(there - here for there, here in zip(starts[0], own_ends, strict=True))
        most = min(there - here for there, here in zip(ends[0], own_starts, strict=True))
        offsets.append(min(max(apart, least), most))
    return offsets


def dearest(sections: list[dict[str, float]]) -> tuple[str, float]:
    """Return what makes a step longest, and how many seconds it would be shorter without that.

    `sections[rank]` has the seconds of "data", "compute" and "sync". A rank's sync is waiting for the others and then
    the network, so the shortest sync of all ranks is the network. A step is the longest data and compute of a rank,
    and the network. Answers: "loader" (data would take no time), "uneven ranks" (no rank would compute longer than the
    lower median of all ranks) or "network" (it would take no time).
    """
    network = min(each["sync"] for each in sections)
    usual = statistics.median_low([each["compute"] for each in sections])
    work = max(each["data"] + each["compute"] for each in sections)
    shorter = {
        "loader": work - max(each["compute"] for each in sections),
        "uneven ranks": work - max(each["data"] + min(each["compute"], usual) for each in sections),
        "network": network,
    }
    cause = max(shorter, key=lambda name: shorter[name])
    return cause, shorter[cause]


def first_divergence(calls: list[list[tuple[str, str]]]) -> tuple[int, int, str] | None:
    """Return number, rank and cause of the first call in which a rank does not do what most do; None: there is none.

    `calls[rank]` has the rank's calls in order: operation, dtype and shape. They are numbered from 0. Compare the
    rank's next two calls, from that number on, with the next two of the others. The first that holds is the cause:
    "ended" (it makes no more calls), "swapped" (the same two in the other order), "skipped" (its first is the others'
    second), "extra" (its second is the others' first, or the others make none), "other shape" (of the same operation),
    "other operation".
    """
    for number in range(max(map(len, calls))):
        turns = [own[number] if number < len(own) else None for own in calls]
        usual = max(turns, key=turns.count)
        odd = [rank for rank, turn in enumerate(turns) if turn != usual]
        if odd:
            break
    else:
        return None
    mine, theirs = (calls[rank][number : number + 2] for rank in (odd[0], turns.index(usual)))
    if not mine:
        return number, odd[0], "ended"
    if len(mine) == 2 and mine == theirs[::-1]:
        return number, odd[0], "swapped"
    if mine[0] in theirs[1:]:
        return number, odd[0], "skipped"
    if not theirs or theirs[0] in mine[1:]:
        return number, odd[0], "extra"
    return number, odd[0], "other shape" if mine[0][0] == theirs[0][0] else "other operation"


def find_flip(sums: Tensor) -> tuple[int, int, int] | None:
    """Return step, tensor and rank of the first difference between replicas, or None; on every rank the same.

    `sums[step, tensor]` are this rank's checksums. Three or more ranks call this, and most are right. A replica that
    has differed once differs from then on, in each later step. Of several tensors that differ, the first counts.

    Shapes: sums [S, T], int64
    Cost: one number per rank for each of 1 + log2(S) steps, then T numbers per rank once.
    """

    def of_all_ranks(row: Tensor) -> Tensor:
        everyone = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, row)
        return torch.stack(everyone)

    def differs(step: int) -> bool:
        totals = of_all_ranks(sums[step].sum().view(1))
        return bool((totals != totals[0]).any())

    low, high = 0, len(sums) - 1
    if not differs(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if differs(middle):
            high = middle
        else:
            low = middle + 1
    votes = of_all_ranks(sums[low].contiguous())
    wrong = votes != votes.mode(0).values
    tensor = int(wrong.any(0).nonzero()[0])
    return low, tensor, int(wrong[:, tensor].nonzero()[0])


def time_sections(
    forward: Callable[[], None],
    backward: Callable[[], None],
    gradients: list[Tensor],
    update: Callable[[], None],
    now: Callable[[], int],
) -> list[int]:
    """Run a step of data parallel training; return how long forward, backward, sync and update took.

    Backward fills the gradients. Sync makes each of them the mean over ranks, in place. `now()` is the time.
    """
    cuts = [now()]
    forward()
    cuts.append(now())
    backward()
    cuts.append(now())
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
    for work in works:
        work.wait()
    for gradient in gradients:
        gradient /= dist.get_world_size()
    cuts.append(now())
    update()
    cuts.append(now())
    return [after - before for before, after in pairwise(cuts)]
