"""What a recorder saw of one rank, as spans: calls on a lane per group, and the time in which the rank was blocked."""

from __future__ import annotations

import linecache
from collections.abc import Sequence

import numpy as np

from distlab.comm import Records
from distlab.trace import Span, Trace

LEAST_WAIT_NS = 20_000


def trace_of(records: Records, rank: int, world_size: int, sections: Trace) -> Trace:
    """Return the calls of a rank, and its waits: those of Python, and those inside of DDP's reducer.

    torch's DDP makes its calls in C++, under the line that runs backward, and waits for them there when backward ends.
    The last of them starts when the last gradient is ready; from then on backward waits, as long as that call lasts.
    """
    spans, unwaited = [], []
    for call in records.calls(rank):
        lane = "communication" if len(call.group) == world_size else f"communication of ranks {call.group}"
        if call.op in ("send", "recv"):
            ends = (rank, call.peer) if call.op == "send" else (call.peer, rank)
            lane = f"{ends[0]} to {ends[1]}"
        end_ns = max(call.start_ns, call.end_ns or call.wait_ns)
        name = f"{call.op} #{call.number}"
        spans.append(Span(rank, lane, name, call.op, call.start_ns, end_ns, call.num_bytes))
        if 0 < call.wait_ns < call.end_ns:
            spans.append(Span(rank, "wait", name, "wait", call.wait_ns, call.end_ns))
        elif not call.wait_ns and call.op not in ("send", "recv") and not call.via and _is_backward(call.site, call.op):
            unwaited.append(spans[-1])
    spans += _waits_in_reducer(sections, unwaited)
    return Trace.from_spans(spans)


def _is_backward(site: str, op: str) -> bool:
    """Whether a call was made in C++ under a line that runs backward, not by Python code in a hook or in that line."""
    file, _, number = site.rpartition(":")
    line = linecache.getline(file, int(number) if number.isdigit() else 0)
    return "backward" in line and op not in line


def _waits_in_reducer(sections: Trace, unwaited: Sequence[Span]) -> list[Span]:
    starts = np.array([span.start_ns for span in unwaited], np.int64)
    found = []
    for backward in sections.select(sections.is_word("kind", "B")):
        last = int(np.searchsorted(starts, backward.end_ns)) - 1
        if last >= 0 and starts[last] >= backward.start_ns:
            call = unwaited[last]
            end_ns = min(call.end_ns, backward.end_ns)
            if end_ns - call.start_ns >= LEAST_WAIT_NS:
                found.append(Span(call.rank, "wait", call.name, "wait", call.start_ns, end_ns))
    return found
