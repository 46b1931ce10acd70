"""What a step waits for, and the call in which ranks part: cases on which every usual mistake gives another answer."""

from __future__ import annotations

from typing import Any

from distlab.course.grading.cases import Cases, Given
from distlab.grading import Mutant


def _ranks(*rows: tuple[Any, Any, tuple[float, float]]) -> tuple[list[dict[str, list[tuple[float, float]]]]]:
    return ([{"load": load, "compute": compute, "sync": [sync]} for load, compute, sync in rows],)


# Of each rank: loads, computing, sync.
STEPS: Given = {
    "all ranks alike": _ranks(([(0, 2)], [(2, 12)], (12, 16)), ([(0, 2)], [(2, 12)], (12, 16))),
    "rank 1 computes longer: the others wait in sync": _ranks(
        ([(0, 1)], [(1, 6)], (6, 21)), ([(0, 1)], [(1, 18)], (18, 21)), ([(0, 1)], [(1, 6)], (6, 20.5))
    ),
    "rank 2 loads longer": _ranks(
        ([(0, 2)], [(2, 9)], (9, 22)), ([(0, 1)], [(1, 8)], (8, 22)), ([(0, 11)], [(11, 18)], (18, 22))
    ),
    "the wire is slow": _ranks(([(0, 1)], [(1, 6)], (6, 20)), ([(0, 2)], [(2, 7)], (7, 21))),
    "computing hides most of a load": _ranks(([(0, 12)], [(4, 14)], (14, 17)), ([(0, 9)], [(4, 12)], (12, 17))),
    "the next batch is read in sync": _ranks(([(0, 2), (8, 19)], [(2, 8)], (8, 12)), ([(0, 2)], [(2, 7)], (7, 12))),
    "a rank loads long and computes little": _ranks(([(0, 8)], [(8, 11)], (11, 20)), ([(0, 1)], [(1, 15)], (15, 20))),
    "forward inside a longer span": _ranks(
        ([(0, 9)], [(9, 16), (9, 12), (12, 16)], (16, 18)), ([(0, 1)], [(1, 7)], (7, 18))
    ),
    "rank 1 begins later": _ranks(([(1, 3)], [(3, 9)], (9, 20.5)), ([(2, 4)], [(4, 11)], (11, 19))),
    "an update after sync": _ranks(([(0, 1)], [(1, 5), (11, 14)], (5, 11)), ([(0, 2)], [(2, 6), (11, 16)], (6, 11))),
    "one rank": _ranks(([(0, 7)], [(7, 12)], (12, 13))),
}

A, B, C = ("all_reduce", "float32[64]"), ("all_reduce", "float32[128]"), ("broadcast", "int64[1]")
D = ("all_gather", "float32[64]")
USUAL = [A, B, C, D]


def _calls(own: list[Any], rank: int = 1, ranks: int = 4, usual: list[Any] | None = None) -> tuple[list[Any]]:
    rows = [list(USUAL if usual is None else usual) for _ in range(ranks)]
    rows[rank] = own
    return (rows,)


CALLS: Given = {
    "nothing differs": _calls(USUAL),
    "rank 1 leaves call 1 out": _calls([A, C, D]),
    "rank 0 leaves call 0 out": _calls([B, C, D], 0),
    "rank 2 swaps calls 1 and 2, and stops": _calls([A, C, B], 2),
    "rank 3 makes one call more, number 1": _calls([A, D, B, C, D], 3),
    "rank 1 gives another shape in call 2": _calls([A, B, ("broadcast", "int64[2]"), D]),
    "rank 2 makes another operation in call 0": _calls([("reduce", "float32[64]"), B, C, D], 2, 3),
    "rank 1 makes no call from 2 on": _calls([A, B], 1, 3),
    "rank 1 makes one call more than the others": _calls([A, C], 1, 3, [A]),
    "rank 1 leaves one out and waits at once": _calls([A, B, D], 1, 3),
    "rank 2 swaps calls 0 and 1, then gives another shape": _calls([B, A, ("broadcast", "int64[9]")], 2, 3),
}

_LAST, _WIRE = 'max(ranks, key=lambda rank: rank["sync"][0][0])', '"wire": over - came'
_LOADER = 'covered(loads + last["compute"]) - covered(last["compute"])'

WRONG_LIMIT = (
    Mutant("longest sync", "waiting is no wire", "a long sync is waiting; the last rank does not wait", 1).edit(
        _WIRE, '"wire": max(rank["sync"][0][1] - rank["sync"][0][0] for rank in ranks)'
    ),
    Mutant("mean sync", "mean sync", "the mean of sync has the waiting of all others in it", 1).edit(
        _WIRE, '"wire": sum(rank["sync"][0][1] - rank["sync"][0][0] for rank in ranks) / len(ranks)'
    ),
    Mutant("rank 0", "rank 0", "it waits: look at the rank whose sync begins last", 1).edit(_LAST, "ranks[0]"),
    Mutant("slowest loader", "longest load", "the rank that loads longest may come early", 1).edit(
        _LOADER, 'max(covered(rank["load"]) for rank in ranks)'
    ),
    Mutant("longest computing", "longest computing", "the rank that computes longest may come early", 1).edit(
        _LAST, 'max(ranks, key=lambda rank: covered(rank["compute"]))'
    ),
    Mutant("hidden loads", "hidden counted", "a load that computing hides costs nothing", 1).edit(
        _LOADER, "covered(loads)"
    ),
    Mutant("loads in sync", "loads in sync", "what is read during sync is for a later step", 1).edit(
        '[(start, min(end, came)) for start, end in last["load"] if start < came]', 'last["load"]'
    ),
    Mutant("added up", "counted twice", "time that two spans cover counts once", 1).edit(
        "total + max(0.0, end - max(start, reached))", "total + end - start"
    ),
    Mutant("means", "means", "a step waits for its last rank: a mean over ranks is no part of it", 1)
    .edit(_LOADER, 'sum(covered(rank["load"]) for rank in ranks) / len(ranks)')
    .edit('"step": covered(last["compute"])', '"step": sum(covered(rank["compute"]) for rank in ranks) / len(ranks)'),
    Mutant("seconds", "no share", "return the share of the step, not its time", 1).edit(
        "parts[longest] / (until - first)", "parts[longest]"
    ),
    Mutant("of the parts", "share of parts", "divide by the whole step: from its first start to its last end", 1).edit(
        "(until - first)", "sum(parts.values())"
    ),
    Mutant("until sync ends", "end of sync", "a step ends with its last computing, which may come after sync", 1).edit(
        "(until - first)", "(over - first)"
    ),
    Mutant("own end", "own end", "the sum is there when the last rank leaves, not when this one does", 1).edit(
        'max(rank["sync"][0][1] for rank in ranks)', 'last["sync"][0][1]'
    ),
)

WRONG_DIVERGENCE = (
    Mutant("rank 0 is right", "rank 0 believed", "rank 0 may be the one that is wrong: most ranks are right", 1).edit(
        "max(turns, key=turns.count)", "turns[0]"
    ),
    Mutant(
        "fewest calls", "fewest calls", "the rank of the fewest calls may be right: find the first that differs", 1
    ).edit(
        "odd = [rank for rank, turn in enumerate(turns) if turn != usual]",
        "odd = [rank for rank, own in enumerate(calls) if len(own) == min(map(len, calls)) and len(set(turns)) > 1]",
    ),
    Mutant("from 1", "off by one", "calls are numbered from 0", 1).edit(
        "return number, odd[0]", "return number + 1, odd[0]", times=5
    ),
    Mutant(
        "shortest list", "end unseen", "a rank that makes no more calls parts there too: look up to the longest list", 1
    ).edit("max(map(len, calls))", "min(map(len, calls))"),
    Mutant("operations alone", "shapes unseen", "the operation is the same and the shape is not: compare both", 1).edit(
        "own[number] if number", "own[number][0] if number"
    ),
    Mutant("swapped unseen", "swap unseen", "it makes the same two calls in the other order: that is a swap", 1).edit(
        "if len(mine) == 2 and mine == theirs[::-1]:", "if False:"
    ),
    Mutant("skipped and extra", "turned round", "its first call is the others' second: it left one out", 1)
    .edit('"skipped"', '"-"')
    .edit('"extra"', '"skipped"')
    .edit('"-"', '"extra"'),
    Mutant("shape as operation", "operation blamed", "the operation is the same; its shape is another", 1).edit(
        '"other shape" if mine[0][0] == theirs[0][0] else "other operation"', '"other operation"'
    ),
    Mutant("the longest is right", "longest believed", "a rank may make one call more: most ranks are right", 1).edit(
        "max(turns, key=turns.count)", "max(calls, key=len)[number]"
    ),
    Mutant(
        "last difference", "last difference", "what differs later follows from the first difference: report that one", 1
    ).edit("range(max(map(len, calls)))", "reversed(range(max(map(len, calls))))"),
    Mutant("shape first", "shape first", "the first cause that holds counts; other shape is the last but one", 1).edit(
        "if len(mine) == 2",
        'if theirs and mine[0][0] == theirs[0][0]:\n    return number, odd[0], "other shape"\nif len(mine) == 2',
    ),
    Mutant("too far", "too far", "the next two calls of each side decide, not what comes later", 1).edit(
        "[number : number + 2]", "[number:]"
    ),
)

drive_limit, drive_divergence = Cases(STEPS), Cases(CALLS)
