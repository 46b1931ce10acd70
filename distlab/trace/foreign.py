"""Chrome traces that another program wrote, such as torch.profiler, read as a Trace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from distlab.trace.span import Span, Trace

_LIMIT = 2**31


def read_foreign(events: list[Any]) -> dict[str, Trace]:
    """Read complete events (X) and pairs of begin and end (B, E); other events carry no span and are passed over.

    Raises:
        ValueError: an event is not an object, has no number as its time, or ends before it starts.
    """
    ranks: dict[str, int] = {}
    lanes: dict[tuple[str, str], str] = {}
    parts: list[tuple[str, str, str, str, int, int, int]] = []
    for index, event in enumerate(events):
        if not isinstance(event, dict):
            raise ValueError(f"event {index} is {str(event)[:40]}; expected an object")
        if event.get("ph") == "M" and event.get("name") == "thread_name" and isinstance(event.get("args"), dict):
            lanes[_text(event.get("pid")), _text(event.get("tid"))] = _text(event["args"].get("name", ""))
    for index, event, start_ns, end_ns in _durations(events):
        pid, tid = _text(event.get("pid")), _text(event.get("tid"))
        num_bytes = _num_bytes(event, index)
        parts.append((pid, tid, _text(event.get("name", "")), _text(event.get("cat", "")), start_ns, end_ns, num_bytes))
        ranks.setdefault(pid, 0)
    ranks = dict(zip(ranks, _number_ranks(list(ranks)), strict=True))
    spans = [
        Span(ranks[pid], lanes.get((pid, tid), tid), name, kind, start_ns, end_ns, num_bytes)
        for pid, tid, name, kind, start_ns, end_ns, num_bytes in parts
    ]
    return {"trace": Trace.from_spans(spans)}


def _durations(events: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any], int, int]]:
    """Yield place, event, start and end of everything that lasts."""
    begun: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
    for index, event in enumerate(events):
        thread = (_text(event.get("pid")), _text(event.get("tid")))
        if event.get("ph") == "X":
            start_ns = _nanoseconds(event.get("ts"), index, "ts")
            duration_ns = _nanoseconds(event.get("dur", 0), index, "dur")
            if duration_ns < 0:
                raise ValueError(f"event {index} lasts {event['dur']} us; expected a duration of at least 0")
            yield index, event, start_ns, start_ns + duration_ns
        elif event.get("ph") == "B":
            begun.setdefault(thread, []).append((index, event))
        elif event.get("ph") == "E" and begun.get(thread):
            start_index, start = begun[thread].pop()
            start_ns = _nanoseconds(start.get("ts"), start_index, "ts")
            end_ns = _nanoseconds(event.get("ts"), index, "ts")
            if end_ns < start_ns:
                raise ValueError(f"event {index} ends event {start_index} before it starts; the trace is out of order")
            yield start_index, start, start_ns, end_ns


def _nanoseconds(value: object, index: int, field: str) -> int:
    """Turn a number of microseconds, which some programs write as text, into whole nanoseconds."""
    try:
        microseconds = float(value)  # type: ignore[arg-type]
        if not math.isfinite(microseconds) or abs(microseconds) > 4e15:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"event {index}: {field} is {str(value)[:40]!r}; expected a number of microseconds") from None
    return round(microseconds * 1000)


def _num_bytes(event: dict[str, Any], index: int) -> int:
    args = event.get("args")
    value = args.get("bytes", 0) if isinstance(args, dict) else 0
    return value if type(value) is int and 0 <= value < 2**63 else 0


def _number_ranks(pids: list[str]) -> list[int]:
    """Number processes: a pid that is a small whole number stays, any other takes the next number that is free."""
    taken = {int(pid) for pid in pids if pid.isascii() and pid.isdigit() and len(pid) <= 10 and int(pid) < _LIMIT}
    ranks, free = [], 0
    for pid in pids:
        if pid.isascii() and pid.isdigit() and len(pid) <= 10 and int(pid) < _LIMIT:
            ranks.append(int(pid))
            continue
        while free in taken:
            free += 1
        taken.add(free)
        ranks.append(free)
    return ranks


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value)
