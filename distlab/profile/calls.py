"""Calls that ranks make together: which belong together, when the last rank came, and when bytes travelled.

The k-th call of one kind, in one step, over one group, is the same call on all of its ranks. A collective moves nothing
before its last rank has come; until then the others wait for that rank. A receive waits for its send in the same way.
All ranks leave a collective at nearly the same time, so the first that sees its end is right: a rank that computes sees
the end of its call when it looks the next time.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distlab.trace import Trace

Ints = NDArray[np.int64]
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Kinds of calls of which no rank can leave before the last one has come."""
NOT_CALLS = ("compute", "wait", "step", "host")
"""Lanes that hold no calls."""
_MESSAGE = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


@dataclass(frozen=True)
class Calls:
    """The calls of all ranks.

    Attributes:
        spans: a row for each call of each rank.
        step: of each row, the number of the step in which it began.
        number: of each row, the same number on every rank that takes part; -1: no partner is known.
    """

    spans: Trace
    step: Ints
    number: Ints

    @cached_property
    def arrival_ns(self) -> Ints:
        """When the last rank of each row's call had come; the row's own start where no partner is known."""
        arrival = self.spans.start_ns.copy()
        last: dict[int, int] = {}
        makes = ~self.spans.is_word("kind", "recv", "RECV_F", "RECV_B")
        for row in np.flatnonzero((self.number >= 0) & makes).tolist():
            number = int(self.number[row])
            last[number] = max(last.get(number, arrival[row]), arrival[row])
        for row in np.flatnonzero(self.number >= 0).tolist():
            arrival[row] = max(arrival[row], last.get(int(self.number[row]), arrival[row]))
        return np.minimum(arrival, self.spans.end_ns)

    @property
    def travels(self) -> Trace:
        """The calls while bytes travel: from the arrival of the last rank on."""
        return replace(self.spans, start_ns=self.arrival_ns)

    @property
    def late(self) -> Trace:
        """The calls while they wait for a different rank: until the last one has come."""
        return replace(self.spans, end_ns=self.arrival_ns)

    @property
    def alone_ns(self) -> Ints:
        """How long each call had the wire: not while the call before it, of the same rank and lane, was under way."""
        spans, begin = self.spans, self.arrival_ns.copy()
        for rank, lane in set(zip(spans.rank.tolist(), spans.lane.tolist(), strict=True)):
            rows = np.flatnonzero((spans.rank == rank) & (spans.lane == lane))
            before = np.maximum.accumulate(spans.end_ns[rows])[:-1]
            begin[rows[1:]] = np.maximum(begin[rows[1:]], before)
        alone: Ints = np.maximum(0, spans.end_ns - begin)
        return alone

    def with_first_ends(self) -> Calls:
        """Let each collective end when the first rank saw its end, after all had come; clocks have to be aligned."""
        spans = self.spans
        rows = np.flatnonzero((self.number >= 0) & spans.is_word("kind", *TOGETHER))
        number, size = self.number[rows], int(self.number.max(initial=-1)) + 1
        first, came = np.full(size, np.iinfo(np.int64).max), np.full(size, np.iinfo(np.int64).min)
        np.minimum.at(first, number, spans.end_ns[rows])
        np.maximum.at(came, number, spans.start_ns[rows])
        ends = spans.end_ns.copy()
        ends[rows] = np.minimum(ends[rows], np.maximum(first, came)[number])
        return Calls(replace(spans, end_ns=np.maximum(ends, spans.start_ns)), self.step, self.number)

    def take(self, rows: NDArray[np.bool_]) -> Calls:
        """Keep some rows."""
        return Calls(self.spans.take(rows), self.step[rows], self.number[rows])


def calls_of(trace: Trace, windows: dict[int, Ints]) -> Calls:
    """Find the calls of all ranks that begin in a step, and which of them are one.

    What a technique and a recorder both noted counts once, as the recorder saw it.
    """
    spans = trace.select(~trace.is_word("lane", *NOT_CALLS))
    spans = spans.take(np.argsort(spans.start_ns, kind="stable"))
    spans = spans.select(~_noted_twice(spans))
    step = np.full(len(spans), -1, np.int64)
    for rank, own in windows.items():
        mine = spans.rank == rank
        place = np.searchsorted(own[:, 0], spans.start_ns[mine], side="right") - 1
        step[mine] = np.where((place >= 0) & (spans.start_ns[mine] < own[place, 1]), place, -1)
    spans, step = spans.take(step >= 0), step[step >= 0]
    return Calls(spans, step, _numbers(spans, step))


def _numbers(spans: Trace, step: Ints) -> Ints:
    """Number the calls; ranks that made different numbers of calls of a kind in a step have no partners there."""
    count: Counter[tuple[object, ...]] = Counter()
    keys: list[tuple[object, ...]] = []
    for span, when in zip(spans, step.tolist(), strict=True):
        message, kind = _MESSAGE.fullmatch(span.name), span.kind
        if message:
            stage, side, letter, microbatch = message.groups()
            edge = int(stage) - ((side == "RECV") == (letter == "F"))  # between this stage and the next
            channel: object = (edge, letter, microbatch)
            kind = "message"
        elif span.kind in ("send", "recv"):
            channel, kind = span.lane, "message"
        else:
            channel = span.lane
        if kind != "message" and kind not in TOGETHER:
            keys.append(())
            continue
        count[span.rank, when, channel, kind] += 1
        keys.append((when, channel, kind, count[span.rank, when, channel, kind]))
    numbers: dict[tuple[object, ...], int] = {}
    partners = Counter(keys)
    totals: dict[tuple[object, ...], set[int]] = {}
    for (_, *which), total in count.items():
        totals.setdefault(tuple(which), set()).add(total)
    found = []
    for key in keys:
        known = bool(key) and partners[key] > 1 and len(totals[key[:3]]) == 1
        if key and key[2] == "message":
            known = partners[key] == 2
        found.append(numbers.setdefault(key, len(numbers)) if known else -1)
    return np.array(found, np.int64).reshape(-1)


def _noted_twice(spans: Trace) -> NDArray[np.bool_]:
    """Mark calls as techniques note them where a recorder, which names calls "all_reduce #7", saw the same kind."""
    is_numbered = np.array([" #" in word for word in spans.words], bool)
    recorded = is_numbered[spans.name] if len(spans) else np.zeros(0, bool)
    pairs = list(zip(spans.rank.tolist(), spans.kind.tolist(), strict=True))
    seen = {pair for pair, is_recorded in zip(pairs, recorded.tolist(), strict=True) if is_recorded}
    twice: NDArray[np.bool_] = np.array([pair in seen for pair in pairs], bool) & ~recorded
    return twice
