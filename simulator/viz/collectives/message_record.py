"""Read from recorded calls which message met which receive, in what order, and who waits for whom forever.

Time is put in steps of cause and effect: what a rank does next stands one step further right, and a message arrives at
least one step after it was sent. The picture then does not depend on how fast the ranks are.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from simulator.viz.collectives.ring_record import RecordedCall

PAIRS = ("send", "recv")


class DiagramCall(RecordedCall, Protocol):
    """One recorded call: what a diagram of messages needs to know about it. A `distlab.comm` Call has all of it."""

    @property
    def number(self) -> int:
        """Its number among the calls that it can meet."""

    @property
    def group(self) -> tuple[int, ...]:
        """Ranks of the group."""

    @property
    def wait_ns(self) -> int:
        """When the rank began to wait for it, or 0."""

    @property
    def state(self) -> str:
        """One of "issued", "waiting", "done" and "failed"."""

    @property
    def channel(self) -> int:
        """What calls share that can meet: their group, or their pair of ranks and tag."""


class CallEvent(NamedTuple):
    """One call in the diagram; x in steps.

    Attributes:
        call: its number in the list of all calls.
        rank: who made it.
        op: the operation.
        peer: the rank at the other end, or -1.
        num_bytes: payload.
        group: ranks of its group.
        start_x: when it was made.
        wait_x: when the rank began to wait for it.
        end_x: when it was over; None: never.
        waits: whether the rank still waits for it.
    """

    call: int
    rank: int
    op: str
    peer: int
    num_bytes: int
    group: tuple[int, ...]
    start_x: float
    wait_x: float
    end_x: float | None
    waits: bool


MAX_CALLS = 240


class Diagram(NamedTuple):
    """Calls on lines of ranks, and which of them meet.

    Attributes:
        ranks: all that made a call, or were to take part in one.
        events: in the order in which they were made.
        pairs: numbers of a send and the receive that it met.
        meetings: numbers of the calls of one collective.
        waits_for: for each rank that never went on, the ranks that it waits for.
        duration_s: from the first call to the last that is known.
        last_x: where the last known thing happened.
        num_left_out: calls that are not shown.
    """

    ranks: tuple[int, ...]
    events: tuple[CallEvent, ...]
    pairs: tuple[tuple[int, int], ...]
    meetings: tuple[tuple[int, ...], ...]
    waits_for: dict[int, tuple[int, ...]]
    duration_s: float
    last_x: float
    num_left_out: int


def read_diagram(records: Iterable[DiagramCall]) -> Diagram:
    """Read the diagram of recorded calls.

    Where there are more than MAX_CALLS calls, it keeps the last ones if a rank hangs, else the first ones.

    Raises:
        ValueError: there are no calls.
    """
    calls = sorted(records, key=lambda call: call.start_ns)
    if not calls:
        raise ValueError("the records hold no call; run something that sends or receives, with record=True")
    stuck = any(_is_stuck(call) for call in calls)
    left_out = max(0, len(calls) - MAX_CALLS)
    calls = calls[left_out:] if stuck else calls[:MAX_CALLS]
    pairs, meetings = _meet(calls)
    times = _steps(calls, pairs, meetings)
    events = tuple(
        CallEvent(index, c.rank, c.op, c.peer, c.num_bytes, tuple(c.group), *times[index], _is_stuck(c))
        for index, c in enumerate(calls)
    )
    members = {rank for call in calls for rank in (call.rank, *call.group)}
    first = calls[0].start_ns
    last = max(max(call.start_ns, call.wait_ns, call.end_ns) for call in calls)
    last_x = max(x for place in times for x in place if x is not None)
    waits = _waits(events, meetings)
    return Diagram(tuple(sorted(members)), events, pairs, meetings, waits, (last - first) / 1e9, last_x, left_out)


def cycle_of(waits_for: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Return ranks of which each waits for the next, and the last for the first; nothing where there is no cycle."""
    for first in waits_for:
        path: list[int] = []
        rank = first
        while rank in waits_for and rank not in path:
            path.append(rank)
            rank = waits_for[rank][0]
        if rank in path:
            cycle = path[path.index(rank) :]
            low = cycle.index(min(cycle))
            return tuple(cycle[low:] + cycle[:low])
    return ()


def _is_stuck(call: DiagramCall) -> bool:
    return not call.end_ns and call.state in ("waiting", "failed") and call.wait_ns > 0


def _meet(calls: list[DiagramCall]) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, ...], ...]]:
    """Pair sends with receives in order, tag by tag, and collect the calls of each collective."""
    arrivals: dict[tuple[int, int, int], deque[int]] = defaultdict(deque)
    meetings: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        if call.op == "recv":
            channel = call.channel if call.peer >= 0 else 0  # from anyone: the record cannot say from which channel
            arrivals[call.peer, call.rank, channel].append(index)
        elif call.op != "send":
            meetings[call.channel, call.number].append(index)
    pairs = []
    for index, call in enumerate(calls):
        if call.op == "send":
            waiting = arrivals.get((call.rank, call.peer, call.channel)) or arrivals.get((-1, call.peer, 0))
            if waiting:
                pairs.append((index, waiting.popleft()))
    return tuple(pairs), tuple(tuple(met) for met in meetings.values())


Place = tuple[float, float, float | None]


def _steps(
    calls: list[DiagramCall], pairs: tuple[tuple[int, int], ...], meetings: tuple[tuple[int, ...], ...]
) -> list[Place]:
    """Number what happens: after what the rank did before, and after what made it possible."""
    causes: dict[int, list[int]] = {receive: [send] for send, receive in pairs}
    for met in meetings:
        for index in met:
            causes[index] = [other for other in met if other != index]
    moments = []
    for index, call in enumerate(calls):
        moments.append((call.start_ns, 0, index))
        if call.wait_ns and not 0 < call.end_ns < call.wait_ns:  # no rank stands still for what is over
            moments.append((max(call.wait_ns, call.start_ns), 1, index))
        if call.end_ns:
            moments.append((max(call.end_ns, call.start_ns), 2, index))
    start: dict[int, int] = {}
    wait: dict[int, int] = {}
    end: dict[int, int] = {}
    here: dict[int, int] = {}
    last: dict[int, tuple[int, int]] = {}
    for _, kind, index in sorted(moments):
        rank = calls[index].rank
        now = here.get(rank, -1)
        if kind == 1 and last.get(rank) == (0, index):  # waits at once: the call blocks
            wait[index] = start[index]
        elif kind == 2:
            reached = max([start[cause] for cause in causes.get(index, ()) if cause in start], default=-1)
            here[rank] = end[index] = max(now, reached) + 1
        else:
            here[rank] = (start if kind == 0 else wait)[index] = now + 1
        last[rank] = (kind, index)
    return [
        (
            float(start[index]),
            float(wait.get(index, end.get(index, start[index]))),
            float(end[index]) if index in end else None,
        )
        for index in range(len(calls))
    ]


def _waits(events: tuple[CallEvent, ...], meetings: tuple[tuple[int, ...], ...]) -> dict[int, tuple[int, ...]]:
    """Return whom each stuck rank waits for: the other end, or the members that have not come."""
    came = {index: {events[other].rank for other in met} for met in meetings for index in met}
    waits: dict[int, tuple[int, ...]] = {}
    for event in events:
        if event.waits and event.op in PAIRS and event.peer >= 0:
            waits[event.rank] = (event.peer,)
        elif event.waits:
            missing = tuple(rank for rank in event.group if rank not in came.get(event.call, ()))
            waits[event.rank] = tuple(rank for rank in missing or event.group if rank != event.rank)
    return dict(sorted(waits.items()))
