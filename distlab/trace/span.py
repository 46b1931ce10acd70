"""Span: one thing that a rank did, from when to when; and which calls of several ranks are one.

The k-th call of one kind over one group is the same call on all of its ranks. A collective moves nothing before its
last rank has come; until then the others wait for that rank. A receive waits for its send in the same way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Kinds of calls of which no rank can leave before the last one has come."""
RECEIVES = ("recv", "RECV_F", "RECV_B")
"""Kinds of receives; a technique notes an action's own."""
Key = tuple[str, int, str, int]  # SEND, RECV or, of a pass, ""; stage, letter, micro-batch
_MESSAGE = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


class Span(NamedTuple):
    """One thing that a rank did, from start_ns to end_ns.

    Attributes:
        rank: who did it.
        lane: what it occupied: "compute", "communication", or a group's own lane.
        name: what a reader sees, such as "forward", "2F0", "all_reduce bucket 1".
        kind: what it is, for colour and for sums: "F", "B", "I", "W", "optimizer", "all_reduce", "send", "recv",
            "wait".
        start_ns: start, in nanoseconds on the trace's clock.
        end_ns: end, on the same clock.
        num_bytes: payload moved; 0 for compute.
        stage: pipeline stage, or -1.
        microbatch: micro-batch, or -1.
    """

    rank: int
    lane: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    num_bytes: int = 0
    stage: int = -1
    microbatch: int = -1

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


def key_of(span: Span) -> Key | None:
    """Return which pass of a pipeline it is, or which message; both parts of a backward pass a gradient back: "B"."""
    if found := _MESSAGE.fullmatch(span.name):
        return found[2], int(found[1]), found[3], int(found[4])
    if span.kind in ("F", "B", "I", "W") and span.lane == "compute" and min(span.stage, span.microbatch) >= 0:
        return "", span.stage, span.kind.replace("I", "B"), span.microbatch
    return None


def number_calls(spans: Iterable[Span], steps: Iterable[int]) -> list[int]:
    """Return of each call, given by start, the same number on every rank that takes part; -1: no partner is known.

    Ranks that made different numbers of calls of a kind in a step have no partners there.
    """
    count, totals, keys = Counter[tuple[int, object]](), dict[object, set[int]](), []
    for span, step in zip(spans, steps, strict=True):
        channel, kind = f"{span.lane} {span.stage}", "message" if span.kind in ("send", "recv") else span.kind
        if (message := key_of(span)) and message[0]:
            side, stage, letter, microbatch = message
            edge = stage - ((side == "RECV") == (letter == "F"))  # between this stage and the next
            channel, kind = f"{edge} {letter} {microbatch}", "message"
        where = step, channel, kind
        count[span.rank, where] += kind == "message" or kind in TOGETHER
        keys.append((where, count[span.rank, where]))  # 0: it has no partners
    for (_, at), total in count.items():
        totals.setdefault(at, set()).add(total)
    partners, numbers = Counter(keys), dict[object, int]()

    def has_partners(where: tuple[int, str, str], place: int) -> bool:
        if where[2] == "message":
            return partners[where, place] == 2
        return place > 0 and partners[where, place] > 1 and len(totals[where]) == 1

    return [numbers.setdefault(key, len(numbers)) if has_partners(*key) else -1 for key in keys]


def noted_twice(spans: Sequence[Span]) -> list[bool]:
    """Mark calls as techniques note them where a recorder, which names calls "all_reduce #7", saw the same kind."""
    seen = {(span.rank, span.kind) for span in spans if " #" in span.name}
    return [" #" not in span.name and (span.rank, span.kind) in seen for span in spans]
