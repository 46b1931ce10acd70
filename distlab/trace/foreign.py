"""Chrome traces that another program wrote, such as torch.profiler, read as a Trace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from distlab.trace.span import Span, Trace

_LIMIT = 2**31


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
    begun: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
    for index, event in enumerate(events):
        thread = _thread(event)
        if event.get("ph") == "X":
            start_ns = _nanoseconds(event.get("ts"), index, "ts")
            duration_ns = _nanoseconds(event.get("dur", 0), index, "dur")
            if duration_ns < 0:
                raise ValueError(f"event {index} lasts {event['dur']} us; expected a duration of at least 0")
            yield event, start_ns, start_ns + duration_ns
        elif event.get("ph") == "B":
            begun.setdefault(thread, []).append((index, event))
        elif event.get("ph") == "E" and begun.get(thread):
            start_index, start = begun[thread].pop()
            start_ns = _nanoseconds(start.get("ts"), start_index, "ts")
            end_ns = _nanoseconds(event.get("ts"), index, "ts")
            if end_ns < start_ns:
                raise ValueError(f"event {index} ends event {start_index} before it starts; the trace is out of order")
            yield start, start_ns, end_ns


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
