"""Spans of one rank, arrivals of all ranks: cases on which every usual mistake gives another number."""

from __future__ import annotations

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

drive_exposed, drive_late = Cases(EXPOSED), Cases(LATE)
