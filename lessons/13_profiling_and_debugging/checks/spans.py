"""Spans of one rank, arrivals of all ranks, clocks: cases on which every usual mistake gives another number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlab.course.grading.cases import Cases, Given
from distlab.grading import Evidence, Mutant

EXPOSED: Given = {
    "a call that reaches out of computing": ([(0, 50)], [(40, 90)]),
    "two calls at once, after computing": ([(0, 30)], [(30, 80), (40, 60)]),
    "a short span of computing inside a long one": ([(0, 100), (20, 30)], [(10, 120)]),
    "spans in any order": ([(60, 70), (0, 20)], [(50, 65), (10, 30)]),
    "nothing computed": ([], [(5, 20), (5, 25)]),
    "nothing sent": ([(5, 25)], []),
    "a gap between two calls": ([(0, 10)], [(10, 20), (50, 70)]),
}

LATE: Given = {
    "rank 1 comes last": ([[1.0], [4.0], [2.0]],),
    "two calls, each with another last rank": ([[1.0, 10.0], [2.0, 13.0], [5.0, 12.0]],),
    "rank 0 comes last twice": ([[3.0, 9.0], [1.0, 7.5], [2.0, 7.0]],),
    "two ranks": ([[2.0, 5.0, 9.0], [2.5, 4.0, 9.0625]],),
    "no call": ([[], []],),
}

MS = 1_000_000
CLOCKS: Given = {
    "rank 1's clock is 100 behind, and nobody is late": (
        [[0, 50, 90], [-100, -50, -10]],
        [[9, 60, 99], [-91, -40, -1]],
    ),
    "rank 1 comes 30 late to each call": ([[0, 100, 200], [530, 630, 730]], [[40, 140, 241], [540, 640, 740]]),
    "one end is seen 5 ms late": (
        [[0, 8 * MS, 16 * MS], [70, 8 * MS + 70, 16 * MS + 70]],
        [[10, 8 * MS + 10, 16 * MS + 12], [81, 13 * MS, 16 * MS + 82]],
    ),
    "most ends of rank 1 are seen late": ([[0, 100, 200], [5, 105, 205]], [[20, 110, 210], [25, 160, 270]]),
    "three ranks": (
        [[0, 100, 200], [1000, 1100, 1200], [-2000, -1900, -1800]],
        [[5, 106, 204], [1006, 1105, 1205], [-1995, -1896, -1794]],
    ),
    "most ends of rank 0 are seen late": ([[0, 100, 200], [5, 105, 205]], [[11, 160, 270], [10, 110, 210]]),
    "two calls": ([[0, 100], [5, 105]], [[10, 111], [11, 109]]),
}


def use_clocks(fn: Callable[..., Any], starts: list[list[int]], ends: list[list[int]]) -> list[float]:
    """Return the offsets as floats, whole numbers or not."""
    return [float(offset) for offset in fn(starts, ends)]


def budget_exposed(evidence: Evidence) -> list[str]:
    """Say what was asked."""
    return [f"{len(EXPOSED)} timelines of one rank"]


WRONG_EXPOSED = (
    Mutant("all calls", "hidden counted", "what computing hides costs nothing; leave it out", 1).without(
        " and working == 0"
    ),
    Mutant("the hidden part", "hidden part", "that is the part under computing; the exposed one is the rest", 1).edit(
        "working == 0", "working > 0"
    ),
    Mutant("each call by itself", "counted twice", "time in which two calls are under way counts once", 1).edit(
        "+= now - before", "+= moving * (now - before)"
    ),
    Mutant(
        "one span at a time", "nested", "a span that ends inside a longer one does not end the computing around it", 1
    ).edit("working + work,", "max(work, 0) if work else working,"),
    Mutant(
        "hidden twice", "hidden twice", "two spans that overlap hide the same time once: merge the spans of computing"
    ).body("""
        sent = {at for start, end in calls for at in range(start, end)}
        return len(sent) - sum(len(sent & {*range(start, end)}) for start, end in compute)
    """),
    Mutant(
        "sums subtracted", "sums", "how long both last does not say whether they overlap: compare the times", 1
    ).body("return max(0, sum(end - start for start, end in calls) - sum(end - start for start, end in compute))"),
    Mutant(
        "from first to last", "gaps counted", "between two calls nothing is under way: such a gap is no call", 1
    ).edit(
        "cuts = [cut for start, end in calls",
        "cuts = [cut for start, end in calls and [(min(calls)[0], max(end for _, end in calls))]",
    ),
    Mutant("nothing computed", "computing exposed", "that is time that computes while nothing is sent", 1).edit(
        "moving > 0 and working == 0", "moving == 0 and working > 0"
    ),
    Mutant("not sorted", "nothing hidden", "that is the sum of the calls; go through all times in order", 1).edit(
        "sorted(cuts)", "cuts"
    ),
    Mutant("equal cuts once", "begun together", "two calls that begin at one time are two: both must end", 1).edit(
        "sorted(cuts)", "sorted(set(cuts))"
    ),
    Mutant("ends", "ends counted", "a span from 5 to 20 lasts 15: its end is no part of it", 1).body("""
        sent, busy = ({at for start, end in spans for at in range(start, end + 1)} for spans in (calls, compute))
        return len(sent - busy)
    """),
)

_COSTS = "costs[times.index(last)] += last - second"

WRONG_LATE = (
    Mutant(
        "waiting is working", "waiting blamed", "that is how long each rank waits; the one that waits least is late", 1
    ).edit(_COSTS, "costs = [cost + last - time for cost, time in zip(costs, times)]"),
    Mutant(
        "since the first", "since the first", "compare with the last of the others: they come at several times too", 1
    ).edit("last - second", "last - min(times)"),
    Mutant(
        "since the mean", "since the mean", "a call begins with its last rank; the mean of all begins nothing", 1
    ).edit("last - second", "last - sum(times) / len(times)"),
    Mutant("the first rank", "first blamed", "the cost belongs to the rank that comes last, not to the first", 1).edit(
        "times.index(last)", "times.index(min(times))"
    ),
    Mutant(
        "waiting added up", "added over ranks", "ranks wait at the same time: seconds of all of them do not add up", 1
    ).edit("last - second", "sum(last - time for time in times)"),
    Mutant("all since the first", "all blamed", "only the rank that comes last holds a call up, and no other", 1).edit(
        _COSTS, "costs = [cost + time - min(times) for cost, time in zip(costs, times)]"
    ),
    Mutant("all since the mean", "all blamed", "a call waits for its last rank alone: no other costs or saves", 1).edit(
        _COSTS, "costs = [cost + time - sum(times) / len(times) for cost, time in zip(costs, times)]"
    ),
    Mutant("largest alone", "largest alone", "add up over the calls; the dearest call alone is kept", 1).edit(
        _COSTS, "costs[times.index(last)] = max(costs[times.index(last)], last - second)"
    ),
    Mutant("per call", "mean", "return the sum over all calls, not the mean", 1).edit(
        "last - second", "(last - second) / len(arrivals[0])"
    ),
    Mutant("one call", "one call", "add up over the calls; an assignment keeps the last one alone", 1).edit(
        "+= last", "= last"
    ),
    Mutant("for each", "for each", "ranks wait at the same time: count it once, not for each that waits", 1).edit(
        "last - second", "(last - second) * (len(times) - 1)"
    ),
    Mutant(
        "others' mean", "others' mean", "without it the call begins with the last of the others, not at their mean", 1
    ).edit("last - second", "last - (sum(times) - last) / (len(times) - 1)"),
    Mutant(
        "sums first", "sums first", "each call has a last rank of its own: compare call by call, then add up", 1
    ).edit("zip(*arrivals, strict=True)", "[[sum(own) for own in arrivals]]"),
)

_MEDIAN = "statistics.median("
WRONG_CLOCKS = (
    Mutant(
        "starts", "starts", "a rank that comes late has no other clock: compare ends, at which all leave together", 1
    ).edit("zip(ends[0], own_ends, strict=True)", "zip(starts[0], own_starts, strict=True)"),
    Mutant("sign", "sign", "that is by how much the rank is ahead; return what to add to its times", 1).edit(
        "append(min(max(apart, least), most))", "append(-min(max(apart, least), most))"
    ),
    Mutant("mean", "mean", "one end that is seen late moves the mean; take the median", 1).edit(
        _MEDIAN, "statistics.fmean("
    ),
    Mutant("first call", "one call", "one call says little; take the median of all", 1).edit(_MEDIAN, "next("),
    Mutant(
        "no bounds", "effect before cause", "a rank would leave a call before another came: keep to the bounds", 1
    ).edit("min(max(apart, least), most)", "apart"),
    Mutant(
        "middle of the bounds", "middle", "bounds are wide where a rank comes late; the median of ends is nearer", 1
    ).edit("min(max(apart, least), most)", "(least + most) / 2"),
    Mutant(
        "least difference", "smallest", "ends are seen late on both ranks: neither extreme is right, the median is", 1
    ).edit(_MEDIAN, "min("),
    Mutant(
        "no upper bound", "effect before cause", "no rank leaves before another has come: there is a bound above too", 1
    ).edit("min(max(apart, least), most)", "max(apart, least)"),
    Mutant(
        "lower of two", "lower median", "of an even number of differences the median is the mean of the middle two", 1
    ).edit(_MEDIAN, "statistics.median_low("),
    Mutant("whole numbers", "rounded", "return the offset as it is: rounding moves each time", 1).edit(
        "append(min(max(apart, least), most))", "append(int(min(max(apart, least), most)))"
    ),
    Mutant("middles", "middles", "a rank that comes late has a later middle: compare ends", 1).edit(
        "there - here for there, here in zip(ends[0], own_ends, strict=True)",
        "(sum(there) - sum(here)) / 2 for there, here in zip(zip(starts[0], ends[0]), zip(own_starts, own_ends))",
    ),
    Mutant("of each", "of each", "two ranks' medians may be of different calls: subtract call by call first", 1).edit(
        "append(min(max(apart, least), most))", "append(statistics.median(ends[0]) - statistics.median(own_ends))"
    ),
    Mutant("neighbour", "neighbour", "that is the clock of the rank before; rank 0's is asked of all ranks", 1)
    .edit("(ends[0]", "(ends[max(len(offsets) - 1, 0)]", times=2)
    .edit("(starts[0]", "(starts[max(len(offsets) - 1, 0)]"),
    Mutant("bounds", "bounds", "a bound is a start of one rank and an end of the other", 1)
    .edit("starts[0], own_ends", "starts[0], own_starts")
    .edit("ends[0], own_starts", "ends[0], own_ends"),
)

drive_exposed, drive_late, drive_clocks = Cases(EXPOSED), Cases(LATE), Cases(CLOCKS, use_clocks)
