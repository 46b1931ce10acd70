"""Lay the calls of all ranks side by side: which calls meet, whether they agree, and who has come how far.

Calls of one channel meet in order: the k-th collective of a group on every member, the k-th send from a to b with a tag
and the k-th receive. Calls that meet must agree in operation, root, shapes and dtype (collectives), or in number of
elements and dtype (send and receive); gloo checks none of this and hangs or gives wrong numbers.

Calls that are alike in operation and shape and that ranks make in a different order are found by their lines:
they meet and add up different tensors, and nothing else in the record shows it. What is told is an exchange: two
or three calls of a group, where each rank makes the same ones and not all in the same order. Calls are the same when
one line makes them, or two lines of one function that read alike, as in the branches of `if rank == 1`. A program that
takes turns, where an `if` chooses between a rank's two lines, is never accused. Nor is one whose lines stand in a hook
and in what runs after backward: a bucket may start in either, so the line does not say which bucket it is. What a line
is its text and the lines above it say, by their indentation; where they leave a doubt nothing is told.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.comm.agree import not_the_same
from distlab.comm.record.file import GROUP, OPS, RECV, ROW, RecordHeader
from distlab.comm.record.read import Records, call_of, group_ranks, is_pair

_BARRIER = OPS.index("barrier")
_MET = np.dtype([*ROW.descr, ("rank", "i8"), ("line", "i8")])  # a call, whose it is, and a number of its call site
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


_SPLITS = re.compile(r", gives \[([\d, ]*)\], takes \[([\d, ]*)\]")  # as a recorder writes them
_ALL_TO_ALL = OPS.index("all_to_all")
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd: channels stay apart when a call's number is added


def channel_of(group: str, op: str, rank: int, peer: int, tag: int) -> int:
    """Return the number of the channel on which a call meets others: its group, or source, destination and tag."""
    if op in ("send", "recv"):
        source, destination = (rank, peer) if op == "send" else (peer, rank)
        group += f" {source}>{destination} tag {tag}"
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "little")


def fingerprint_of(op: str, root: int, shapes: Sequence[tuple[Sequence[int], str]], reduction: str = "") -> int:
    """Return a number for what must agree between calls that meet.

    Args:
        op: the operation.
        root: global rank of the root, or -1.
        shapes: shape and dtype of each tensor.
        reduction: how values are combined, such as "sum", or "".
    """
    if op in ("send", "recv"):
        meets: object = [(math.prod(shape), dtype) for shape, dtype in shapes]
    elif op == "all_to_all":  # ranks may give and take different amounts
        meets = (op, sorted({dtype for _, dtype in shapes}))
    else:
        meets = (op, root, reduction, [(list(shape), dtype) for shape, dtype in shapes])
    return zlib.crc32(repr(meets).encode())


class CallLedger:
    """Calls of the ranks of one job; feed it rows as they appear."""

    def __init__(self) -> None:
        self.names: dict[int, list[str]] = {}
        self._numbers: defaultdict[int, dict[tuple[int, bool], int]] = defaultdict(dict)
        self._incomplete: set[int] = set()
        self.open: NDArray[Any] = np.empty(0, _MET)  # after `disagreement`: calls that not all have made who meet there
        self._site_numbers: dict[str, int] = {}
        self._forks: defaultdict[int, dict[int, Calls]] = defaultdict(dict)  # made from several lines, by channel
        self._exchanged: Sequence[Calls] = ()
        self._open_ends: set[tuple[str, int]] = set()

    def add(self, rank: int, rows: NDArray[Any], names: list[str], *, dropped: bool = False) -> None:
        """Enter a rank's next rows, oldest first.

        Args:
            rank: whose they are.
            rows: as they stand in the file.
            names: the texts that they name.
            dropped: rows before them were overwritten unread.
        """
        self.names[rank] = names
        if dropped:
            self._incomplete.add(rank)
        if not len(rows):
            return
        channels = zip(rows["channel"].tolist(), (rows["op"] == RECV).tolist(), strict=True)
        self._numbers[rank].update(zip(channels, rows["seq"].tolist(), strict=True))
        for row in rows[is_pair(rows) & (rows["parties"] == 0)]:
            self._open_ends.add((names[row["group"]], rank))
        rows = rows[rows["parties"] > 1]
        meeting = np.zeros(len(rows), _MET)
        meeting[[name for name, *_ in ROW.descr]] = rows
        own, inverse = np.unique(meeting["site"], return_inverse=True)
        numbers = [self._site_numbers.setdefault(names[site], len(self._site_numbers)) for site in own.tolist()]
        meeting["rank"], meeting["line"] = rank, np.array(numbers, np.int64)[inverse]
        self.open = np.concatenate([self.open, meeting])

    def has_made(self, rank: int, row: Any, *, receive: bool = False) -> bool:
        """Tell whether a rank has made its part of a call; where rows were lost unread, assume that it has."""
        number = self._numbers[rank].get((int(row["channel"]), receive))
        if number is None:
            return rank in self._incomplete
        return number >= int(row["seq"])

    def disagreement(self) -> NDArray[Any] | None:
        """Return the rows, by rank, of the earliest calls that meet and do not agree; forget those that all agree.

        Calls of all_to_all do not agree either where a rank gives more or less than a rank takes.
        """
        while len(self.open):
            keys = self.open["channel"] * _SPREAD + self.open["seq"]
            order = np.argsort(keys, kind="stable")
            keys, rows = keys[order], self.open[order]
            starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
            sizes = np.diff(np.r_[starts, len(keys)])
            wrong = rows["fp"] != np.repeat(rows["fp"][starts], sizes)
            if not wrong.any():
                for key in np.unique(keys[rows["op"] == _ALL_TO_ALL]):
                    found = np.sort(rows[keys == key], order="rank")
                    if unfit_splits(found, self.names):
                        return found
                waiting = np.repeat(sizes, sizes) < rows["parties"]
                forked = (rows["line"] != np.repeat(rows["line"][starts], sizes)) & ~waiting & ~is_pair(rows)
                for start in starts[np.add.reduceat(forked.astype(np.int64), starts) > 0].tolist():
                    self._enter_fork(rows[start : start + int(sizes[np.searchsorted(starts, start)])])
                self.open = rows[waiting]
                return None
            first = np.flatnonzero(wrong)[np.argmin(rows["start"][wrong])]
            met = keys == keys[first]
            row, rank = rows[first], int(rows["rank"][first])
            receiver = rank if row["op"] == RECV else int(row["peer"])  # one that takes from anyone has no known order
            if not is_pair(row) or (self.names[rank][row["group"]], receiver) not in self._open_ends:
                return np.sort(rows[met], order="rank")
            self.open = rows[~met]
        return None

    def _enter_fork(self, rows: NDArray[Any]) -> None:
        """Remember calls that met and agree, made from more than one line; find those that are exchanged."""
        if rows[0]["op"] == _BARRIER or self._exchanged:  # it carries nothing that could be exchanged
            return
        forks, number = self._forks[int(rows[0]["channel"])], int(rows[0]["seq"])
        forks[number] = dict(zip(rows["rank"].tolist(), rows, strict=True))
        # Neighbours: two, two with one between (a list turned round), three (rotated).
        windows = [(number - 1, number), (number, number + 1), (number - 2, number), (number, number + 2)]
        for window in (*windows, *((n, n + 1, n + 2) for n in range(number - 2, number + 1))):
            calls = [forks[n] for n in window if n in forks]
            if len(calls) == len(window) and _is_exchange(calls, self.names):
                self._exchanged = calls
                return
        if len(forks) > _KEPT:
            del forks[min(forks)]

    def exchange(self) -> str:
        """Say which calls `disagreement` has found to be exchanged: every rank's operation, shape and lines; or ""."""
        if not self._exchanged:
            return ""
        ranks, names = sorted(self._exchanged[0]), self.names
        calls = {rank: [call_of(rank, met[rank], names[rank]) for met in self._exchanged] for rank in ranks}
        members = list(group_ranks(names[ranks[0]][self._exchanged[0][ranks[0]]["group"]]))
        numbers = " and ".join(f"#{call.number}" for call in calls[ranks[0]])
        head = f"the ranks of group {members} make calls that are alike in a different order, calls {numbers}:"
        lines = [f"  rank {rank}: {', then '.join(map(str, own))}" for rank, own in calls.items()]
        rule = (
            "they would combine different tensors: make them in the same order on every rank (if ranks are meant to "
            "take turns here, choose the line by an if in one function)"
        )
        return "\n".join([head, *lines, rule])


@functools.lru_cache(maxsize=1024)
def splits_in(text: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Read the amounts back from the text of a call; None where it has none."""
    found = _SPLITS.search(text)
    if found is None:
        return None
    gives, takes = (tuple(int(count) for count in part.split(",") if count.strip()) for part in found.groups())
    return gives, takes


def unfit_splits(rows: NDArray[Any], names: Mapping[int, list[str]]) -> list[str]:
    """Say where ranks whose all_to_all calls meet give other amounts than are taken: a line for each pair of ranks."""
    splits = {r: splits_in(names[r][row["what"]]) for r, row in zip(rows["rank"].tolist(), rows, strict=True)}
    members, wrong = group_ranks(names[next(iter(splits))][rows[0]["group"]]), []
    for source, given in splits.items():
        for destination, taken in splits.items():
            if given is None or taken is None or not len(given[0]) == len(taken[1]) == len(members):
                continue
            sent, expected = given[0][members.index(destination)], taken[1][members.index(source)]
            if sent != expected:
                wrong.append(
                    f"  rank {source} gives rank {destination} {sent} elements, and rank {destination} takes "
                    f"{expected} from it"
                )
    return wrong


def explain(ledger: CallLedger, rows: NDArray[Any]) -> str:
    """Say which calls meet and do not agree, with every rank's operation, shape and line."""
    calls = {r: call_of(r, row, ledger.names[r]) for r, row in zip(rows["rank"].tolist(), rows, strict=True)}
    lines = [f"  rank {rank}: {call}" for rank, call in calls.items()]
    if is_pair(rows[0]):
        head = "a send and the receive that takes it do not fit:"
        rule = "give both the same number of elements and the same dtype"
        return "\n".join([head, *lines, rule])
    members = group_ranks(ledger.names[next(iter(calls))][rows[0]["group"]])
    missing, number = [rank for rank in members if rank not in calls], int(rows[0]["seq"])
    if len(set(rows["fp"].tolist())) > 1:
        return not_the_same(members, calls | dict.fromkeys(missing), number)
    head = f"the ranks of group {list(members)} give other amounts than are taken, at their call #{number}:"
    lines = [*unfit_splits(rows, ledger.names), *lines]
    lines += [f"  rank {rank} has not called it yet" for rank in missing]
    rule = "let what rank i gives rank j be what rank j takes from rank i: send the counts first where they vary"
    return "\n".join([head, *lines, rule])


def ledger_of(records: Records) -> CallLedger:
    """Enter everything that was recorded in the newest job."""
    ledger = CallLedger()
    job = max((record.header.job for record in records.by_rank.values()), default=0)
    for rank, record in records.by_rank.items():
        rows = record.rows if record.header.job == job else record.rows[:0]
        ledger.add(rank, rows, record.names, dropped=records.dropped(rank) > 0)
    return ledger


def absences(absent: Collection[int], finished: Collection[int], lacks: str = "it") -> list[str]:
    """Say of each rank that it has not made a call, or never will."""
    return [f"rank {r} {'has returned without it' if r in finished else f'has not called {lacks}'}" for r in absent]


def groups_of(header: RecordHeader, names: Sequence[str]) -> list[str]:
    """Return members and line of each group that a rank has begun to make in its job."""
    start = f"{GROUP} {header.job}."
    return [name.partition(": ")[2] for name in names if name.startswith(start)]


def groups_differ(groups: Mapping[int, Sequence[str]], *, is_over: bool = False) -> str:
    """Return where ranks do not make the same groups, or "".

    Args:
        groups: members and line of each group, by rank.
        is_over: whether the job has ended, so that a group which one rank lacks will not come.
    """
    counts = [len(own) for own in groups.values()] or [0]
    for index in range(max(counts) if is_over else sorted(counts)[-2:][0]):
        made = {own[index].partition(" at ")[0] if index < len(own) else None for own in groups.values()}
        if len(made - {None}) > 1 or (is_over and len(made) > 1):
            lines = [f"  rank {rank}: {own[index] if index < len(own) else 'none'}" for rank, own in groups.items()]
            head = f"the ranks do not make the same groups, at their dist.new_group #{index + 1}:"
            rule = (
                "every rank must call new_group for the same groups in the same order, also for one that it is not in"
            )
            return "\n".join([head, *lines, rule])
    return ""


def left_by_some(left: Mapping[int, str]) -> dict[int, str]:
    """Blame ranks that destroyed a group which not all of its members destroyed; `left`: members and line, by rank."""
    members = {rank: text.partition(" at ")[0] for rank, text in left.items() if text}
    found = {}
    for rank, group in sorted(members.items()):
        others = group_ranks(group) if group.startswith("[") else tuple(left)
        if any(members.get(other) != group for other in others):
            what = f"destroyed a group that the other ranks still used (group {left[rank]})"
            found[rank] = f"{what}: destroy it on every rank after the last call"
    return found
