"""Right answers to lesson 13, written in other ways than the reference."""

import heapq
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


def late_by_beginnings(arrivals):
    begins = lambda rows: sum(max(times) for times in zip(*rows, strict=True))  # noqa: E731
    whole = begins(arrivals)
    return [whole - begins(arrivals[:rank] + arrivals[rank + 1 :]) for rank in range(len(arrivals))]


def limit_by_pieces(ranks):
    came, last = max((rank["sync"][0][0], place) for place, rank in enumerate(ranks))
    cuts = sorted({cut for rank in ranks for spans in rank.values() for span in spans for cut in span})
    parts = {"loader": 0, "step": 0, "wire": max(rank["sync"][0][1] for rank in ranks) - came}
    for a, b in pairwise(cuts):
        inside = [name for name in ranks[last] if any(start <= a and b <= end for start, end in ranks[last][name])]
        if "compute" in inside or ("load" in inside and b <= came):
            parts["step" if "compute" in inside else "loader"] += b - a
    name, longest = max(parts.items(), key=lambda item: item[1])
    return name, longest / (max(end for rank in ranks for _, end in rank["compute"] + rank["sync"]) - cuts[0])


def limit_by_unions(ranks):
    last = sorted(ranks, key=lambda rank: rank["sync"][0])[-1]
    works, came = last["compute"], last["sync"][0][0]
    loads = [(min(start, came), min(end, came)) for start, end in last["load"]]
    over, updates = (np.array([span for rank in ranks for span in rank[name]]).max() for name in ("sync", "compute"))
    first = min(start for rank in ranks for spans in rank.values() for start, _ in spans)
    seconds = exposed_by_unions(works, loads), exposed_by_unions([], works), over - came
    return ("loader", "step", "wire")[int(np.argmax(seconds))], float(max(seconds) / (max(over, updates) - first))


def limit_by_moments(ranks):
    last = max(ranks, key=lambda rank: rank["sync"][0][0])
    came = last["sync"][0][0]
    events = [(at, kind, by) for kind in ("load", "compute") for a, b in last[kind] for at, by in ((a, 1), (b, -1))]
    busy, loader, step = Counter(), 0.0, 0.0
    for (now, kind, by), (later, *_) in pairwise(sorted([*events, (came, "sync", 0)])):
        busy[kind] += by
        step += (later - now) * bool(busy["compute"])
        loader += (later - now) * (bool(busy["load"]) and not busy["compute"] and later <= came)
    wire = max(end for rank in ranks for _, end in rank["sync"]) - came
    begins = min(spans[0][0] for rank in ranks for spans in map(sorted, rank.values()) if spans)
    whole = max(end for rank in ranks for name in ("compute", "sync") for _, end in rank[name]) - begins
    return max((("loader", loader / whole), ("step", step / whole), ("wire", wire / whole)), key=lambda pair: pair[1])


def resume_by_rows(used, files, context, batch, num_ranks):
    places = [(file, token) for file, tokens in enumerate(files) for token in range(tokens)]
    left = places[: (len(places) - 1) // context * context : context][sum(used) :][:batch]
    cuts = [len(left) // num_ranks * rank + min(rank, len(left) % num_ranks) for rank in range(num_ranks + 1)]
    return [left[start:stop] for start, stop in pairwise(cuts)]


def resume_by_numpy(used, files, context, batch, num_ranks):
    begins = np.cumsum([0, *files])
    tokens = np.arange(sum(used), min(sum(used) + batch, (begins[-1] - 1) // context)) * context
    inside = np.searchsorted(begins, tokens, side="right") - 1
    pairs = np.stack([inside, tokens - begins[inside]], axis=1)
    return [[(int(file), int(token)) for file, token in own] for own in np.array_split(pairs, num_ranks)]


def resume_by_walking(used, files, context, batch, num_ranks):
    at, reads = sum(used) * context, [[] for _ in range(num_ranks)]
    left = min(batch, (sum(files) - 1) // context - sum(used))
    for rank, own in enumerate(reads):
        for _ in range(left // num_ranks + (rank < left % num_ranks)):
            file, token, at = 0, at, at + context
            while token >= files[file]:
                file, token = file + 1, token - files[file]
            own.append((file, token))
    return reads


def balance_by_heap(lengths, num_ranks, same_count):
    heap, shares = [(0, rank) for rank in range(num_ranks)], [[] for _ in range(num_ranks)]
    for sample in np.argsort(-np.array(lengths, dtype=int), kind="stable").tolist():
        tokens, rank = heapq.heappop(heap)
        shares[rank].append(sample)
        if not same_count or len(shares[rank]) < len(lengths) // num_ranks:
            heapq.heappush(heap, (tokens + lengths[sample], rank))
    return shares


def balance_by_rows(lengths, num_ranks, same_count):
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    wide, state = num_ranks if same_count else 1, [(0, [])] * num_ranks
    for start in range(0, len(order), wide):
        state.sort(key=lambda one: one[0])
        for place, sample in enumerate(order[start : start + wide]):
            state[place] = state[place][0] + lengths[sample], [*state[place][1], sample]
    return [own for _, own in state]


def balance_by_room(lengths, num_ranks, same_count):
    order = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    if same_count:  # there and back
        turns = [order[at : at + num_ranks] for at in range(0, len(order), num_ranks)]
        return [[turn[r if odd % 2 else -1 - r] for odd, turn in enumerate(turns)] for r in range(num_ranks)]
    for room in range(max(lengths, default=0), sum(lengths) + 1):  # first fit: the least room in which all have a place
        shares, tokens = [[] for _ in range(num_ranks)], [0] * num_ranks
        for sample in order:
            rank = next((rank for rank in range(num_ranks) if tokens[rank] + lengths[sample] <= room), 0)
            shares[rank].append(sample)
            tokens[rank] += lengths[sample]
        if max(tokens) <= room:
            return shares
    return None


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
