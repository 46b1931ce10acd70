"""Find calls that are alike in operation and shape and that ranks make in a different order, by their lines.

Such calls meet and add up different tensors, and nothing else in the record shows it. What is told is an exchange: two
or three calls of a group, where each rank makes the same ones and not all in the same order. Calls are the same when
one line makes them, or two lines of one function that read alike, as in the branches of `if rank == 1`. A program that
takes turns, where an `if` chooses between a rank's two lines, is never accused. Nor is one whose lines stand in a hook
and in what runs after backward: a bucket may start in either, so the line does not say which bucket it is. What a line
is its text and the lines above it say, by their indentation; where they leave a doubt nothing is told.
"""

from __future__ import annotations

import functools
import linecache
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from numpy.typing import NDArray

from distlab.comm.record.file import OPS
from distlab.comm.record.read import call_of, group_ranks

_BARRIER = OPS.index("barrier")
_KEPT = 64  # forked calls of a group that are remembered
_FUNCTION = re.compile(r"(async\s+)?def\s")
_BRANCH = re.compile(r"(if|elif|else|while|try|except|finally|match|case)\b")
_HEADER = re.compile(r":\s*(#.*)?$")

Calls = Mapping[int, Any]  # the rows of calls that met, by rank


class SourceLine(NamedTuple):
    """What a line of source is.

    Attributes:
        function: file and first line of the innermost function that holds it.
        text: what stands there.
        branches: the lines of that function that begin the branches in which it stands.
        is_inner: the function is a method, a lambda or inside a different one, as hooks are.
    """

    function: tuple[str, int]
    text: str
    branches: frozenset[int]
    is_inner: bool


class Exchanges:
    """Remember a job's calls that ranks made from different lines, and tell where these are exchanged."""

    def __init__(self) -> None:
        self._forks: defaultdict[int, dict[int, Calls]] = defaultdict(dict)
        self._found: Sequence[Calls] = ()

    def add(self, rows: NDArray[Any], ranks: Sequence[int], names: Mapping[int, list[str]]) -> None:
        """Enter calls that met and agree, made from more than one line."""
        if rows[0]["op"] == _BARRIER or self._found:  # it carries nothing that could be exchanged
            return
        forks, number = self._forks[int(rows[0]["channel"])], int(rows[0]["seq"])
        forks[number] = dict(zip(ranks, rows, strict=True))
        # Neighbours: two, two with one between (a list turned round), three (rotated).
        windows = [(number - 1, number), (number, number + 1), (number - 2, number), (number, number + 2)]
        for window in (*windows, *((n, n + 1, n + 2) for n in range(number - 2, number + 1))):
            calls = [forks[n] for n in window if n in forks]
            if len(calls) == len(window) and _is_exchange(calls, names):
                self._found = calls
                return
        if len(forks) > _KEPT:
            del forks[min(forks)]

    def explain(self, names: Mapping[int, list[str]]) -> str:
        """Say which calls are exchanged, with every rank's operation, shape and lines; "" where none are."""
        if not self._found:
            return ""
        ranks = sorted(self._found[0])
        calls = {rank: [call_of(rank, met[rank], names[rank]) for met in self._found] for rank in ranks}
        members = list(group_ranks(names[ranks[0]][self._found[0][ranks[0]]["group"]]))
        numbers = " and ".join(f"#{call.number}" for call in calls[ranks[0]])
        head = f"the ranks of group {members} make calls that are alike in a different order, calls {numbers}:"
        lines = [f"  rank {rank}: {', then '.join(map(str, own))}" for rank, own in calls.items()]
        rule = (
            "they would combine different tensors: make them in the same order on every rank (if ranks are meant to "
            "take turns here, choose the line by an if in one function)"
        )
        return "\n".join([head, *lines, rule])


def _is_exchange(calls: Sequence[Calls], names: Mapping[int, list[str]]) -> bool:
    """Tell whether every rank makes the same calls, each once, and not all in the same order."""
    if len({int(row["fp"]) for met in calls for row in met.values()}) > 1:
        return False
    orders = set()
    for rank in calls[0]:
        places = [place_of(names[rank][met[rank]["site"]]) for met in calls]
        known = [place for place in places if place is not None]
        if len(known) < len(calls) or any("backward(" in place.text for place in known):  # hooks call inside of it
            return False
        if any(
            a.branches != b.branches if a.function == b.function else a.is_inner or b.is_inner
            for a, b in pairwise(known)
        ):
            return False
        orders.add(tuple((place.function, place.text) for place in known))
    first = sorted(next(iter(orders)))
    return len(orders) > 1 and len(set(first)) == len(first) and all(sorted(order) == first for order in orders)


@functools.lru_cache(maxsize=4096)
def place_of(site: str) -> SourceLine | None:
    """Return what stands at a call site, "file:line"; None where it cannot be read, or begins a branch itself."""
    file, _, number = site.rpartition(":")
    lines = linecache.getlines(file)[: int(number) if number.isdigit() else 0]
    text = lines[-1].strip() if lines else ""
    if not text or _BRANCH.match(text):
        return None
    depth, branches = _depth(lines[-1]), set[int]()
    for at in range(len(lines) - 1, 0, -1):
        above = lines[at - 1]
        if not above.strip() or above.lstrip().startswith("#") or _depth(above) >= depth:
            continue
        depth, begins = _depth(above), above.strip()
        if _FUNCTION.match(begins):
            return SourceLine((file, at), text, frozenset(branches), depth > 0 or "lambda" in text)
        if begins[0] in ")]}":  # the end of a header of several lines
            depth += 1
        elif not _HEADER.search(begins):  # such as a line of a string
            return None
        elif _BRANCH.match(begins):
            branches.add(at)
    return SourceLine((file, 0), text, frozenset(branches), "lambda" in text)


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
