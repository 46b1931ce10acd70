"""Right answers to lesson 13, written in other ways than the reference."""

import statistics
from collections import Counter
from itertools import pairwise, zip_longest

import numpy as np
import torch
import torch.distributed as dist


def exposed_by_pieces(compute, calls):
    cuts = sorted({cut for span in (*compute, *calls) for cut in span})
    inside = lambda spans, a, b: any(start <= a and b <= end for start, end in spans)  # noqa: E731
    return sum(b - a for a, b in pairwise(cuts) if inside(calls, a, b) and not inside(compute, a, b))


def merged(spans):
    kept = []
    for start, end in sorted(spans):
        if kept and start <= kept[-1][1]:
            kept[-1][1] = max(kept[-1][1], end)
        else:
            kept.append([start, end])
    return kept


def exposed_by_unions(compute, calls):
    length = lambda spans: sum(end - start for start, end in merged(spans))  # noqa: E731
    return length([*compute, *calls]) - length(compute)  # what calls add to the time that is covered


def late_by_loops(arrivals):
    costs = []
    for rank, own in enumerate(arrivals):
        others = [row for other, row in enumerate(arrivals) if other != rank]
        costs.append(sum(max(0.0, time - max(row[call] for row in others)) for call, time in enumerate(own)))
    return costs


def late_by_numpy(arrivals):
    times = np.array(arrivals)
    costs = np.zeros(len(times))
    if times.size:
        order = times.argsort(axis=0)
        gaps = np.take_along_axis(times, order[-1:], 0)[0] - np.take_along_axis(times, order[-2:-1], 0)[0]
        np.add.at(costs, order[-1], gaps)
    return costs.tolist()


def clocks_by_numpy(starts, ends):
    came, left = np.array(starts), np.array(ends)
    middle = np.median(left[0] - left, axis=1)
    return np.clip(middle, (came[0] - left).max(1), (left[0] - came).min(1)).tolist()


def clocks_by_sorting(starts, ends):
    found = []
    for came, left in zip(starts, ends, strict=True):
        calls = range(len(came))
        least = max(starts[0][call] - left[call] for call in calls)
        most = min(ends[0][call] - came[call] for call in calls)
        found.append(sorted((least, statistics.median([ends[0][call] - left[call] for call in calls]), most))[1])
    return found


def dearest_by_numpy(sections):
    data, compute, sync = (np.array([each[name] for each in sections]) for name in ("data", "compute", "sync"))
    usual = np.sort(compute)[(len(compute) - 1) // 2]
    longest = (data + compute).max()
    saved = [longest - compute.max(), longest - (data + compute.clip(max=usual)).max(), sync.min()]
    return ["loader", "uneven ranks", "network"][int(np.argmax(saved))], float(max(saved))


def dearest_by_changes(sections):
    usual = statistics.median_low(each["compute"] for each in sections)
    longest = lambda changed: max(each["data"] + each["compute"] for each in changed)  # noqa: E731
    even = [each | {"compute": min(each["compute"], usual)} for each in sections]
    saved = {"network": min(each["sync"] for each in sections), "uneven ranks": longest(sections) - longest(even)}
    saved["loader"] = longest(sections) - longest([each | {"data": 0.0} for each in sections])
    return max(saved.items(), key=lambda item: item[1])


def cause_of(mine, theirs):
    if not mine:
        return "ended"
    if len(mine) == len(theirs) == 2 and (mine[0], mine[1]) == (theirs[1], theirs[0]):
        return "swapped"
    if len(theirs) > 1 and mine[0] == theirs[1]:
        return "skipped"
    if not theirs or (len(mine) > 1 and mine[1] == theirs[0]):
        return "extra"
    return "other shape" if mine[0][0] == theirs[0][0] else "other operation"


def divergence_by_counter(calls):
    for number, turns in enumerate(zip_longest(*calls)):
        (usual, count), *_ = Counter(turns).most_common()
        if count < len(turns):
            rank = next(rank for rank, turn in enumerate(turns) if turn != usual)
            right = calls[turns.index(usual)]
            return number, rank, cause_of(calls[rank][number:][:2], right[number:][:2])
    return None


def divergence_by_lists(calls):
    right = max(calls, key=calls.count)
    for rank, own in enumerate(calls):
        if own != right:
            number = next(at for at in range(len(own) + 1) if own[: at + 1] != right[: at + 1])
            return number, rank, cause_of(own[number : number + 2], right[number : number + 2])
    return None


def gathered(row):
    every = [torch.zeros_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(every, row)
    return every


def flip_by_extremes(sums):
    low, high = -1, len(sums) - 1  # they agree at low (before the first step: trivially), and differ at high
    differ = lambda step: differs_from_extremes(sums[step].sum().view(1).clone())  # noqa: E731
    if not differ(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if differ(middle) else (middle, high)
    rows = torch.stack(gathered(sums[high].contiguous()))
    usual = rows.median(0).values  # most are equal, so the median is one of these
    places = (rows != usual).T.nonzero()
    return high, int(places[0, 0]), int(places[0, 1])


def differs_from_extremes(total):
    every = torch.cat(gathered(total))
    return bool(every.min() != every.max())


def flip_by_into_tensor(sums):
    n = dist.get_world_size()

    def look(step):
        votes = sums.new_empty(n)
        dist.all_gather_into_tensor(votes, sums[step].sum().reshape(1))
        return len(votes.unique()) > 1

    steps = range(len(sums))
    if not look(steps[-1]):
        return None
    while len(steps) > 1:
        half = len(steps) // 2
        steps = steps[:half] if look(steps[half - 1]) else steps[half:]
    rows = sums.new_empty(n * sums.shape[1])
    dist.all_gather_into_tensor(rows, sums[steps[0]].contiguous())
    wrong = rows.view(n, -1) != rows.view(n, -1).mode(0).values
    tensor = int(wrong.any(0).int().argmax())
    return steps[0], tensor, int(wrong[:, tensor].int().argmax())


def repair_one_by_one(forward, backward, gradients, update, now):
    times = []
    for work in (forward, backward, None, update):
        start = now()
        if work is not None:
            work()
        for gradient in gradients if work is None else ():
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())
        times.append(now() - start)
    return times


def repair_by_differences(forward, backward, gradients, update, now):
    def sync():
        for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            work.wait()
        torch._foreach_div_(gradients, dist.get_world_size()) if gradients else None

    reads = [now(), *((work(), now())[1] for work in (forward, backward, sync, update))]
    return (np.array(reads[1:]) - np.array(reads[:-1])).tolist()
