"""Reference solutions of lesson 13: what a trace, a hang and a table of checksums say, as functions of plain lists.

The library's versions are in `distlab.profile` (sections, findings), `distlab.loading` (batches, lengths),
`distlab.comm.record` (calls that do not meet) and `distlab.elastic.votes` (flipped bits).
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, pairwise

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


def limit_of_step(ranks: list[dict[str, list[tuple[float, float]]]]) -> tuple[str, float]:
    """Return what a step waits for longest, "loader", "step" or "wire", and which share of the step that is.

    `ranks[rank]` has spans of one step, pairs of start and end, in any order: "load" (its loader reads, perhaps ahead),
    "compute", and "sync": the one span in which the rank waits for the sums of all ranks. Those travel when the last
    rank has begun its sync. That rank decides. All its computing is the step's time. What it loads before its sync,
    while it computes nothing, is the loader's. From the start of its sync to the last end of a sync it is the wire's.
    A step lasts from the first start of any span to the last end of computing or sync.
    """

    def covered(spans: list[tuple[float, float]]) -> float:
        total, reached = 0.0, float("-inf")
        for start, end in sorted(spans):
            total, reached = total + max(0.0, end - max(start, reached)), max(reached, end)
        return total

    last = max(ranks, key=lambda rank: rank["sync"][0][0])
    came, over = last["sync"][0][0], max(rank["sync"][0][1] for rank in ranks)
    loads = [(start, min(end, came)) for start, end in last["load"] if start < came]
    parts = {
        "loader": covered(loads + last["compute"]) - covered(last["compute"]),
        "step": covered(last["compute"]),
        "wire": over - came,
    }
    first = min(start for rank in ranks for spans in rank.values() for start, _ in spans)
    until = max(end for rank in ranks for _, end in rank["compute"] + rank["sync"])
    longest = max(parts, key=lambda name: parts[name])
    return longest, parts[longest] / (until - first)


def next_reads(
    used: list[int], files: list[int], context: int, batch: int, num_ranks: int
) -> list[list[tuple[int, int]]]:
    """Return where each of num_ranks reads in the first step after a resume: file and token of each of its samples.

    `used` says how many samples each rank of the run before has used up since the epoch began: its length is how many
    ranks there were. `files` are the tokens of each file, some 0; together they are one long row. Sample i begins at
    token i x context of that row, and is context tokens and the one behind them, its last target.

    A step takes the next `batch` samples of all ranks, or those that are left in the epoch, and the ranks share them as
    evenly as it goes: rank 0 has the first ones, and the first ranks have one more.
    """
    ends, position = list(accumulate(files)), sum(used)
    batch = min(batch, (ends[-1] - 1) // context - position)
    each, more = divmod(batch, num_ranks)
    reads = []
    for rank in range(num_ranks):
        start = position + rank * each + min(rank, more)
        tokens = [sample * context for sample in range(start, start + each + (rank < more))]
        inside = [bisect_right(ends, token) for token in tokens]
        reads.append([(file, token - ends[file] + files[file]) for file, token in zip(inside, tokens, strict=True)])
    return reads


def share_by_length(lengths: list[int], num_ranks: int, same_count: bool) -> list[list[int]]:
    """Return the samples that each rank takes of a batch, by their numbers, so that no rank has far more tokens.

    Each sample goes to one rank. The rank with the most tokens has at most 4/3 of what it has when they are shared in
    the best way. With `same_count` all ranks take equally many samples (num_ranks divides their number), and then two
    ranks differ by no more tokens than the longest sample and the shortest.
    """
    most = len(lengths) // num_ranks if same_count else len(lengths)
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        rank = min((rank for rank in range(num_ranks) if len(shares[rank]) < most), key=lambda rank: tokens[rank])
        shares[rank].append(sample)
        tokens[rank] += lengths[sample]
    return shares


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
