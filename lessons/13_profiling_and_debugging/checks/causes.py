"""What costs most, and the call in which ranks part: cases on which every usual mistake gives another answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlab.course.grading.cases import Cases, Given
from distlab.grading import Mutant


def _ranks(*rows: tuple[float, float, float]) -> tuple[list[dict[str, float]]]:
    return ([dict(zip(("data", "compute", "sync"), row, strict=True)) for row in rows],)


def use_dearest(fn: Callable[..., Any], sections: list[dict[str, float]]) -> list[Any]:
    """Return the cause and the seconds as a float."""
    cause, seconds = fn(sections)
    return [cause, float(seconds)]


SECTIONS: Given = {
    "rank 1 computes longer": _ranks((0.01, 0.10, 0.07), (0.01, 0.16, 0.01), (0.01, 0.10, 0.07)),
    "rank 0 loads longer": _ranks((0.09, 0.10, 0.02), (0.01, 0.10, 0.10), (0.01, 0.10, 0.10)),
    "the network is slow": _ranks((0.01, 0.10, 0.20), (0.02, 0.11, 0.18), (0.01, 0.10, 0.20)),
    "a rank that loads longer and computes less": _ranks((0.05, 0.10, 0.02), (0.01, 0.16, 0.005), (0.01, 0.11, 0.06)),
    "every rank loads long": _ranks((0.08, 0.10, 0.05), (0.09, 0.10, 0.04), (0.08, 0.10, 0.05)),
    "one rank is fast": _ranks((0.01, 0.10, 0.03), (0.01, 0.10, 0.03), (0.01, 0.02, 0.11)),
    "two of four ranks compute longer": _ranks(
        (0.0, 0.10, 0.10), (0.0, 0.15, 0.05), (0.0, 0.19, 0.01), (0.0, 0.10, 0.10)
    ),
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

_UNEVEN = 'work - max(each["data"] + min(each["compute"], usual) for each in sections)'

WRONG_DEAREST = (
    Mutant(
        "longest sync", "waiting is no network", "a long sync is waiting; the shortest of all ranks is the network", 1
    ).edit('min(each["sync"]', 'max(each["sync"]'),
    Mutant("mean sync", "mean sync", "the mean of sync has the waiting in it; take the shortest of all ranks", 1).edit(
        'min(each["sync"] for each in sections)', 'statistics.fmean(each["sync"] for each in sections)'
    ),
    Mutant(
        "all of the data", "data alone", "that is all of the data's time; without it the longest compute is left", 1
    ).edit('work - max(each["compute"] for each in sections)', 'max(each["data"] for each in sections)'),
    Mutant("data of all ranks", "data added up", "ranks load at the same time: their seconds do not add up", 1).edit(
        'work - max(each["compute"] for each in sections)', 'sum(each["data"] for each in sections)'
    ),
    Mutant("against the fastest", "fastest", "one fast rank makes no other rank slow: take the lower median", 1).edit(
        "statistics.median_low(", "min("
    ),
    Mutant("compute alone", "data left out", "data comes before compute: a rank that loads longer ends later too", 1)
    .edit('each["data"] + min(each["compute"], usual)', 'min(each["compute"], usual)')
    .edit("work - max(min(", 'max(each["compute"] for each in sections) - max(min('),
    Mutant("a share", "share", "return seconds, not a share of the step", 1).edit(
        "return cause, shorter[cause]", "return cause, shorter[cause] / (work + network)"
    ),
    Mutant("mean compute", "mean compute", "a slow rank is in the mean; compare with the lower median", 1).edit(
        "statistics.median_low(", "statistics.fmean("
    ),
    Mutant("means", "means", "a step waits for its slowest rank: a mean over ranks is no part of it", 1).body("""
        means = [statistics.fmean(each[name] for each in sections) for name in ("data", "compute", "sync")]
        return ("loader", "uneven ranks", "network")[means.index(max(means))], max(means)
    """),
    Mutant("left", "left", "that is how long the step is without it; return by how much it is shorter", 1).edit(
        "cause, shorter[cause]", "cause, work + network - shorter[cause]"
    ),
    Mutant("all usual", "all usual", "ranks below the median stay as they are: min(compute, median)", 1).edit(
        'min(each["compute"], usual) for', "usual for"
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

drive_dearest, drive_divergence = Cases(SECTIONS, use_dearest), Cases(CALLS)
