"""Ranks that hold the others up: a straggler, uneven work, a slow loader.

A rank is compared with the lower median of all ranks: that stays a healthy rank while at most half of them are slow.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from distlab.comm.agree import ranks_in_words as name_ranks
from distlab.profile.findings import FLOOR, Finding
from distlab.profile.profile import Profile
from distlab.profile.sections import SECTIONS

Floats = NDArray[np.float64]
SLOWER = 1.08  # times the lower median, from which on a rank is slow
OFTEN = 0.75  # of the steps, in which the same rank has to be slow
SURELY = 3.0  # standard errors, by which a slow rank's mean lies above that of the others: chance alone reaches 2
TOGETHER = 0.7  # least correlation of forward and backward when it is the work that is uneven, not the machine


def find_uneven_ranks(profile: Profile) -> Iterator[Finding]:
    """Find ranks that compute longer than the others.

    A straggler is slow in all that it does. Where the update, whose work no batch changes, is as fast as elsewhere, the
    work is uneven. It is uneven too where ranks hold different stages, or where each step has its own last rank and
    forward and backward are long together.
    """
    seconds = profile.seconds
    if len(seconds) < 2:
        return
    passes, update = _of(seconds, "forward", "backward"), _of(seconds, "optimizer")
    work = passes + update + _of(seconds, "other")
    step_s = float(np.median(profile.step_s))
    if _holds_stages(profile):
        yield from _uneven_stages(profile, work, step_s)
        return
    slower = work / np.maximum(lower_median(work), 1e-12)
    slow = (np.median(slower, axis=1) >= SLOWER) & ((slower >= 1 + (SLOWER - 1) / 2).mean(axis=1) >= OFTEN)
    slow &= _deviations_from_others(work) >= SURELY
    if slow.any():
        slowest = int(np.where(slow, np.median(slower, axis=1), 0.0).argmax())
        more_s = work[slowest] - lower_median(work)
        faster = 1 - 1 / np.maximum(slower[slowest], 1.0)
        cost_s = float(np.median(np.minimum(more_s, _room_s(profile, profile.ranks[slowest], faster))))
        if cost_s < FLOOR * step_s:
            return
        factors = [np.median(each[slow] / np.maximum(lower_median(each), 1e-12)) for each in (passes, update)]
        ranks = tuple(rank for rank, is_slow in zip(profile.ranks, slow, strict=True) if is_slow)
        factor = float(np.median(slower[slow]))
        told = np.median(update) >= 0.004 * step_s and factors[1] - 1 < 0.4 * (factors[0] - 1)
        are = "is" if len(ranks) == 1 else "are"
        if told:
            text = f"{name_ranks(ranks)} compute{'s' if len(ranks) == 1 else ''} {factors[0]:.2g}x as long in forward "
            text += "and backward, but not in the update: more work, not a slower machine"
            yield Finding("imbalance", text, ranks, cost_s, cost_s / step_s, "Give every rank the same work.")
        else:
            text = f"{name_ranks(ranks)} {are} {factor:.2g}x slower"
            advice = "Look at its clock, its temperature and other programs there."
            yield Finding("straggler", text, ranks, cost_s, cost_s / step_s, advice)
        return
    last, mean = passes.argmax(axis=0), passes.mean(axis=0)
    faster_in = 1 - mean / np.maximum(passes.max(axis=0), 1e-12)
    rooms = np.array([_room_s(profile, rank, faster_in) for rank in profile.ranks])
    more_s = np.minimum(passes.max(axis=0) - mean, rooms[last, np.arange(profile.num_steps)])
    cost_s = float(np.median(more_s))
    if cost_s >= FLOOR * step_s and passes.shape[1] >= 4 and _long_together(seconds) >= TOGETHER:
        text = "a different rank is last in each step: forward and backward of the same rank are long together"
        advice = "Batches hold uneven work: sort or pack samples by length."
        yield Finding("imbalance", text, (), cost_s, cost_s / step_s, advice)


def find_slow_loaders(profile: Profile) -> Iterator[Finding]:
    """Find ranks that wait for their data; every rank waits for the slowest of them in the end."""
    data = _of(profile.seconds, "data")
    step_s = float(np.mean(profile.step_s))
    cost_s = float(data.max(axis=0).mean())
    if cost_s < FLOOR * step_s:
        return
    each = data.mean(axis=1)
    slow = each >= 0.5 * each.max()
    ranks = tuple(rank for rank, is_slow in zip(profile.ranks, slow, strict=True) if is_slow)
    everyone = len(ranks) == len(profile.ranks)
    who = "every rank waits" if everyone and len(ranks) > 1 else f"{name_ranks(ranks)} wait{'s' * (len(ranks) == 1)}"
    text = f"{who} for the next batch"
    if np.median(data.max(axis=0)) < 0.25 * cost_s:
        text += ", in some of the steps"
    advice = "Load batches ahead of the step: more workers, or less work for each sample."
    yield Finding("slow loader", text, () if everyone else ranks, cost_s, cost_s / step_s, advice)


def lower_median(values: Floats) -> Floats:
    """Return the lower median over ranks [R, S] -> [S]."""
    ordered: Floats = np.sort(values, axis=0)[(len(values) - 1) // 2]
    return ordered


def _deviations_from_others(work: Floats) -> Floats:
    """Return how far each rank is above the mean of the others, in standard errors over steps [R, S] -> [R]."""
    others = (work.sum(axis=0) - work) / (len(work) - 1)
    ratios = np.log(np.maximum(work, 1e-12) / np.maximum(others, 1e-12))
    errors = ratios.std(axis=1) / np.sqrt(max(1, work.shape[1] - 1))
    deviations: Floats = ratios.mean(axis=1) / np.maximum(errors, 1e-12)
    return deviations


def _room_s(profile: Profile, rank: int, faster: Floats) -> Floats:
    """Return how much earlier each step could end, were the rank faster: the network may be the slower of the two [S].

    The first bucket would leave earlier by its share; after it, calls could move up by the time in which none travels.
    """
    calls, windows, pieces = profile.calls, profile.windows_ns[rank], profile.moments[rank]
    travelled = np.bincount(pieces.step, pieces.length_ns * pieces.shares, profile.num_steps)
    room = np.full(profile.num_steps, np.inf)
    mine = profile.shares & (calls.spans.rank == rank)
    for step in np.unique(calls.step[mine]).tolist():
        rows = mine & (calls.step == step)
        first, last = calls.arrival_ns[rows].min(), calls.spans.end_ns[rows].max()
        room[step] = (first - windows[step, 0]) * faster[step] + (last - first) - travelled[step]
    room_s: Floats = room / 1e9
    return room_s


def _of(seconds: Floats, *sections: str) -> Floats:
    total: Floats = seconds[:, :, [SECTIONS.index(section) for section in sections]].sum(axis=2)
    return total


def _holds_stages(profile: Profile) -> bool:
    trace = profile.trace
    staged = trace.select(trace.is_word("lane", "compute") & (trace.stage >= 0))
    sets = {rank: frozenset(staged.stage[staged.rank == rank].tolist()) for rank in profile.ranks}
    return len(set(sets.values())) > 1


def _uneven_stages(profile: Profile, work: Floats, step_s: float) -> Iterator[Finding]:
    """Compare ranks of a pipeline: it runs at the pace of the rank that has the most to do."""
    middle = np.median(work, axis=1)
    slowest = int(middle.argmax())
    cost_s = float(middle[slowest] - middle.mean())
    if cost_s >= 2 * FLOOR * step_s:
        text = f"the stages of rank {profile.ranks[slowest]} take {middle[slowest] / middle.mean():.2g}x the mean"
        advice = "Cut the model so that stages take equally long."
        yield Finding("imbalance", text, (profile.ranks[slowest],), cost_s, cost_s / step_s, advice)


def _long_together(seconds: Floats) -> float:
    """Return how far a rank's forward and backward are long in the same steps: their correlation."""
    deviations = []
    for section in ("forward", "backward"):
        each = _of(seconds, section)
        deviations.append((each / np.maximum(each.mean(axis=0), 1e-12) - 1).ravel())
    if min(deviation.std() for deviation in deviations) == 0:
        return 0.0
    return float(np.corrcoef(*deviations)[0, 1])
