"""Where ranks read on after a resume, and who takes which of samples of unequal lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlab.course.grading.cases import Cases, Given
from distlab.course.grading.diagnosis.values import whole
from distlab.grading import Evidence, Mutant

FILES = [100, 0, 60, 140]  # 299 tokens have one behind them
READS: Given = {
    "two ranks go on in the middle of a file": ([3, 3], FILES, 10, 4, 2),
    "four ranks were, three are; one file is empty": ([2, 2, 2, 2], FILES, 10, 6, 3),
    "the batch ends in the next file; two ranks were, five are": ([6, 6], FILES, 10, 7, 5),
    "ranks have used up unequal numbers": ([3, 3, 2], FILES, 10, 8, 4),
    "a sample lies in two files": ([1, 1], [25, 40], 10, 4, 2),
    "seven samples are left": ([11, 11], FILES, 10, 12, 3),
    "as many are left as one rank takes": ([9, 9, 9], FILES, 10, 9, 4),
    "the epoch is over": ([5, 4], [91], 10, 4, 2),
    "nothing was used up, and the batch is the epoch": ([0], [50, 51], 10, 12, 2),
}


def use_resume(fn: Callable[..., Any], used: list[int], files: list[int], context: int, batch: int, n: int) -> Any:
    """Return the places of all samples in order, how many each rank has, and what each rank reads."""
    reads = fn(used, files, context, batch, n)
    return {
        "places of all samples": sorted(tuple(map(whole, place)) for own in reads for place in own),
        "number of samples of each rank": [len(own) for own in reads],
        "places of each rank": [list(own) for own in reads],
    }


_POSITION, _TOKENS = "ends, position = list(accumulate(files)), sum(used)", "range(start, start + each + (rank < more))"
_START = "start = position + rank * each + min(rank, more)"
_SUM = "the position is what all old ranks together have used up"

WRONG_RESUME = (
    Mutant("own position", "one rank's count", f"it goes on where one rank stood; {_SUM}: sum(used)", 1).edit(
        "sum(used)", "used[0]"
    ),
    Mutant("times the new ranks", "new ranks' count", f"{_SUM}: their number, not the new one", 1).edit(
        "sum(used)", "used[0] * num_ranks"
    ),
    Mutant("as if equal", "as if equal", "old ranks may have used up unequal numbers: add them up", 1).edit(
        "sum(used)", "max(used) * len(used)"
    ),
    Mutant("from the beginning", "from 0", "it begins the epoch again: samples are used twice", 1).edit(
        "sum(used)", "0"
    ),
    Mutant("from the file's start", "file's start", "it reads the file in which it stood from its start again", 1).edit(
        _POSITION, f"{_POSITION}\nposition = max(end for end in [0, *ends] if end <= position * context) // context"
    ),
    Mutant("from the next file", "next file", "the rest of the file in which it stood is lost", 1).edit(
        _POSITION, f"{_POSITION}\nposition = -(-min(end for end in [0, *ends] if end >= position * context) // context)"
    ),
    Mutant("bisect_left", "file's first token", "a file's first token is not in the file before it", 1).edit(
        "bisect_right(ends, token)", "ends.index(min(end for end in ends if end >= token))"
    ),
    Mutant("token of all", "offset of all files", "the offset counts from the file's own first token", 1).edit(
        "token - ends[file] + files[file]", "token"
    ),
    Mutant("windows with targets", "windows apart", "samples lie context tokens apart: targets overlap", 1)
    .edit("[sample * context for sample", "[sample * (context + 1) for sample")
    .edit("(ends[-1] - 1) // context", "ends[-1] // (context + 1)"),
    Mutant("no last target", "last target", "the last sample has no target: one token must lie behind it", 1).edit(
        "(ends[-1] - 1) // context", "ends[-1] // context"
    ),
    Mutant("samples of each file", "cut at files", "a sample may end in the next file: one long row", 1)
    .edit("list(accumulate(files))", "list(accumulate(files := [max(0, t - 1) // context * context for t in files]))")
    .edit("(ends[-1] - 1)", "ends[-1]"),
    Mutant("past the end", "past the end", "the last step takes what is left", 1)
    .edit("min(batch, (ends[-1] - 1) // context - position)", "batch")
    .edit("bisect_right(ends, token)", "min(bisect_right(ends, token), len(files) - 1)"),
    Mutant("rest dropped", "rest lost", "samples are left before the end: the last step is a smaller one", 1).edit(
        "batch = min(batch, (ends[-1] - 1) // context - position)",
        "batch = batch if (ends[-1] - 1) // context - position >= batch else 0",
    ),
    Mutant("does not divide", "remainder lost", "what does not divide is lost: the first ranks take one more", 1)
    .edit(_START, "start = position + rank * each")
    .edit(_TOKENS, "range(start, start + each)"),
    Mutant("in turn", "dealt in turn", "each rank's samples follow one another: rank 0 has the first ones", 1).edit(
        _TOKENS, "range(position + rank, position + batch, num_ranks)"
    ),
)

LENGTHS: Given = {
    "the longest comes last": ([4, 4, 8], 2, False),
    "every second one is long": ([1, 5, 1, 5, 2, 2], 2, False),
    "the longest come first": ([9, 7, 8, 2, 3, 1], 2, False),
    "one long sample": ([1, 9, 1, 1, 1, 1, 1, 1, 1, 1], 2, False),
    "four ranks": ([3, 3, 5, 5, 7, 9, 7, 9], 4, False),
    "nine samples, equally many for each rank": ([9, 1, 8, 2, 7, 3, 6, 4, 5], 3, True),
    "one long sample, equally many for each rank": ([1, 9, 1, 1, 1, 1], 2, True),
    "in order of length, equally many": ([1, 2, 3, 4, 50, 51, 52, 53], 2, True),
    "fewer samples than ranks": ([5], 2, False),
    "one rank": ([4, 2], 1, True),
    "no sample": ([], 2, True),
}


def use_balance(fn: Callable[..., Any], lengths: list[int], n: int, same_count: bool) -> Any:
    """Return what all right shares have alike: of tokens, that they are within the bound; a wrong one has them all.

    In each case ranks can have equal numbers of tokens, or one rank the longest sample alone: that is the best.
    """
    shares = [[whole(sample) for sample in own] for own in fn(lengths, n, same_count)]
    found = {"number of ranks": len(shares), "samples of all ranks": sorted(sum(shares, []))}
    if same_count:
        found["number of samples of each rank"] = [len(own) for own in shares]
    if found["samples of all ranks"] != list(range(len(lengths))):
        return found | {"tokens of the ranks": "not told"}
    tokens, longest = (
        sorted((sum(lengths[sample] for sample in own) for own in shares), reverse=True),
        max(lengths or [0]),
    )
    if same_count:
        most, words = min(tokens) + longest - min(lengths or [0]), "apart by at most the longest less the shortest"
    else:
        most, words = max(sum(lengths) / n, longest) * 4 / 3, "at most 4/3 of the best"
    return found | {"tokens of the ranks": words if tokens[0] <= most else tokens}


def budget_balance(evidence: Evidence) -> list[str]:
    """Say what was asked."""
    return [f"{len(LENGTHS)} batches: each sample on one rank, and the fullest rank within the bound"]


_LONGEST = "sorted(range(len(lengths)), key=lambda sample: -lengths[sample])"
_RANK = "rank = min((rank for rank in range(num_ranks) if len(shares[rank]) < most), key=lambda rank: tokens[rank])"
_MOST = "most = len(lengths) // num_ranks if same_count else len(lengths)"

WRONG_BALANCE = (
    Mutant("slices", "slices", "slices of the batch have whatever lengths stand there: sort first", 1).body("""
        each = -(-len(lengths) // num_ranks)
        return [list(range(len(lengths)))[rank * each : (rank + 1) * each] for rank in range(num_ranks)]
    """),
    Mutant("in turn", "dealt in turn", "dealing in turn looks at no length", 1).body(
        "return [list(range(rank, len(lengths), num_ranks)) for rank in range(num_ranks)]"
    ),
    Mutant("sorted slices", "sorted slices", "one rank has all the long samples: deal them out", 1).body("""
        order, each = sorted(range(len(lengths)), key=lambda sample: -lengths[sample]), -(-len(lengths) // num_ranks)
        return [order[rank * each : (rank + 1) * each] for rank in range(num_ranks)]
    """),
    Mutant("as they come", "not sorted", "a long sample that comes last makes one rank late: longest first", 1).edit(
        _LONGEST, "range(len(lengths))"
    ),
    Mutant(
        "shortest first", "shortest first", "the longest first, each to the rank with the fewest tokens so far", 1
    ).edit("-lengths[sample])", "lengths[sample])"),
    Mutant("to the fullest", "to the fullest", "give the next sample to the rank with the fewest tokens", 1).edit(
        _RANK, _RANK.replace("min(", "max(")
    ),
    Mutant("never the same count", "same_count unseen", "with same_count all ranks take equally many samples", 1).edit(
        _MOST, "most = len(lengths)"
    ),
    Mutant("always the same count", "always equal", "without same_count ranks may take unequal numbers", 1).edit(
        _MOST, "most = -(-len(lengths) // num_ranks)"
    ),
    Mutant("lengths", "lengths", "return the samples' numbers, not their lengths", 1).edit(
        "append(sample)", "append(lengths[sample])"
    ),
    Mutant("last ones left out", "left out", "samples are left out: each goes to one rank", 1).edit(
        _LONGEST, f"{_LONGEST}[: len(lengths) // num_ranks * num_ranks]"
    ),
)

drive_resume, drive_balance = Cases(READS, use_resume), Cases(LENGTHS, use_balance)
