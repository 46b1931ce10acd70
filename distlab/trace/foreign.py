"""Chrome traces that another program wrote, such as torch.profiler, read as a Trace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from distlab.trace.span import Span, Trace

_LIMIT = 2**31


class _Mark(NamedTuple):
    """Where something begins or ends: when, in which event."""

    time_ns: int
    number: int
    event: dict[str, Any]


def read_foreign(events: list[Any]) -> dict[str, Trace]:
    """Read complete events (X) and pairs of begin and end (B, E); other events carry no span and are passed over.

    Raises:
        ValueError: an event is not an object, has no number as its time, or ends before it starts.
    """
    lanes: dict[tuple[str, str], str] = {}
    for index, event in enumerate(events):
        if not isinstance(event, dict):
            raise ValueError(f"event {index} is {str(event)[:40]}; expected an object")
        if event.get("ph") == "M" and event.get("name") == "thread_name" and isinstance(event.get("args"), dict):
            lanes[_thread(event)] = str(event["args"].get("name", ""))
    lasting = list(durations(events))
    ranks = _number_ranks(dict.fromkeys(str(event.get("pid")) for event, *_ in lasting))
    spans = []
    for event, start_ns, end_ns in lasting:
        pid, tid = _thread(event)
        name, kind = str(event.get("name", "")), str(event.get("cat", ""))
        spans.append(Span(ranks[pid], lanes.get((pid, tid), tid), name, kind, start_ns, end_ns, _num_bytes(event)))
    return {"trace": Trace.from_spans(spans)}


def durations(events: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield event, start and end (nanoseconds) of everything that lasts.

    Raises:
        ValueError: as `read_foreign`.
    """
    marks: dict[tuple[str, str], list[_Mark]] = {}
    for index, event in enumerate(events):
        if event.get("ph") == "X":
            start_ns = _nanoseconds(event.get("ts"), index, "ts")
            duration_ns = _nanoseconds(event.get("dur", 0), index, "dur")
            if duration_ns < 0:
                raise ValueError(f"event {index} lasts {event['dur']} us; expected a duration of at least 0")
            yield event, start_ns, start_ns + duration_ns
        elif event.get("ph") in ("B", "E"):
            time_ns = _nanoseconds(event.get("ts"), index, "ts")
            marks.setdefault(_thread(event), []).append(_Mark(time_ns, index, event))
    for of_thread in marks.values():
        yield from _pairs(of_thread)


def _pairs(marks: list[_Mark]) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Pair the beginnings and ends of a thread; what began before the recording, or ends after it, is passed over.

    A file need not be in order of time. Where it is not, an end comes before a beginning at the same moment.

    Raises:
        ValueError: an end stands behind a beginning in the file, and before it in time.
    """
    if any(later.time_ns < mark.time_ns for mark, later in itertools.pairwise(marks)):
        marks = sorted(marks, key=lambda mark: (mark.time_ns, mark.event["ph"] == "B"))
    begun: list[_Mark] = []
    alone: list[_Mark] = []
    for mark in marks:
        if mark.event["ph"] == "B":
            begun.append(mark)
        elif begun:
            start = begun.pop()
            yield start.event, start.time_ns, mark.time_ns
        else:
            alone.append(mark)
    for end in alone:
        if before := [mark.number for mark in begun if mark.number < end.number]:
            raise ValueError(f"event {end.number} ends event {before[0]} before it starts; write the trace again")


def _nanoseconds(value: object, index: int, field: str) -> int:
    """Turn a number of microseconds, which some programs write as text, into whole nanoseconds."""
    try:
        microseconds = float(value)  # type: ignore[arg-type]
        if not math.isfinite(microseconds) or abs(microseconds) > 4e15:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"event {index}: {field} is {str(value)[:40]!r}; expected a number of microseconds") from None
    return round(microseconds * 1000)


def _num_bytes(event: dict[str, Any]) -> int:
    args = event.get("args")
    value = args.get("bytes", 0) if isinstance(args, dict) else 0
    return value if type(value) is int and 0 <= value < 2**63 else 0


def _number_ranks(pids: Iterable[str]) -> dict[str, int]:
    """Number processes: a pid that is a small whole number stays, any other takes the next number that is free."""
    ranks = {pid: int(pid) for pid in pids if pid.isascii() and pid.isdigit() and len(pid) <= 10 and int(pid) < _LIMIT}
    taken = set(ranks.values())
    free = (number for number in itertools.count() if number not in taken)
    return {pid: ranks[pid] if pid in ranks else next(free) for pid in pids}


def _thread(event: dict[str, Any]) -> tuple[str, str]:
    return str(event.get("pid")), str(event.get("tid"))
