"""A profile of torch.profiler (Kineto's JSON, which Perfetto opens too) as steps of passes and collectives.

    with profile(schedule=schedule(wait=1, warmup=1, active=3), on_trace_ready=...) as profiler:
        for batch in batches:
            step(batch)
            profiler.step()              # the file's ProfilerStep#2, #3, #4

Of a GPU its kernels count, each where it was launched; of a CPU the operators that stand in no other. What is launched
inside Optimizer.step is the update; by autograd, or by another thread than the loop's, backward; the rest forward.
Spans of one kind that follow each other closely are one span, as a prediction's are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distlab.trace.foreign import durations, load_document
from distlab.trace.span import Span, Trace

STEP, UPDATE, BACKWARD = "ProfilerStep#", "Optimizer.step#", "autograd::engine::evaluate_function"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
CALLS = ("c10d::", "record_param_comms")  # they start what a collective's own event shows
COLLECTIVES = {
    "all_reduce": r"all_?reduce",
    "reduce_scatter": r"reduce_?scatter",
    "all_gather": r"all_?gather",
    "all_to_all": r"all_?to_?all",
    "broadcast": r"broadcast",
    "send": r"send",
    "recv": r"recv",
}
NAMES = {"F": "forward", "B": "backward", "optimizer": "optimizer", "copy": "copy"}
CLOSE = 1 / 200  # of a step: gaps that do not part two spans of one kind
Thread = tuple[str, str]


class Profile(NamedTuple):
    """What a profile says of one rank.

    Attributes:
        rank: as the profile names it; 0 where it names none.
        steps: what was done in each step.
        seconds: of each step, from its begin to the next one's.
    """

    rank: int
    steps: tuple[Trace, ...]
    seconds: tuple[float, ...]

    @property
    def median(self) -> Trace:
        """The step of median length; the shorter one of two."""
        return self.steps[int(np.argsort(self.seconds, kind="stable")[(len(self.seconds) - 1) // 2])]


class _Event(NamedTuple):
    """An event that lasts, and where and when it was launched."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    thread: Thread
    launched: tuple[Thread, int]


def read_profile(path: str | Path) -> Profile:
    """Read the steps of one rank's profile.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no Chrome JSON, has no steps, or nothing ran in them.
    """
    path = Path(path)
    around, raw = load_document(path)
    try:
        events = _events(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    steps = sorted((each for each in events if each.name.startswith(STEP)), key=lambda each: each.start_ns)
    steps = [each for each in steps if each.category == "user_annotation"] or steps
    if not steps:
        raise ValueError(f"{path} has no steps; call profiler.step() after each, with a schedule of some active steps")
    named = around.get("distributedInfo")
    rank = named.get("rank", 0) if isinstance(named, dict) else 0
    rank = rank if isinstance(rank, int) and 0 <= rank < 2**31 else 0
    spans = list(_spans(events, steps[0].thread, rank))
    if not spans:
        raise ValueError(f"{path} has no kernels and no operators; profile with activities CPU, or CPU and CUDA")
    traces = []
    for step in steps:
        own = [span for span, at_ns in spans if step.start_ns <= at_ns < step.end_ns]
        traces.append(Trace.from_spans(_merged(own, CLOSE * (step.end_ns - step.start_ns))))
    return Profile(rank, tuple(traces), tuple((step.end_ns - step.start_ns) / 1e9 for step in steps))


def _events(raw: list[Any]) -> list[_Event]:
    """Return all that lasts, each kernel with the thread and the time of the call that launched it."""
    for index, event in enumerate(raw):
        if not isinstance(event, dict):
            raise ValueError(f"event {index} is {str(event)[:40]}; expected an object")
    found = [(event, start, end) for event, start, end in durations(raw) if event.get("name")]
    calls = {_correlation(event): (_thread(event), start) for event, start, _ in found if event.get("cat") in LAUNCHES}
    return [
        _Event(
            str(event["name"]),
            str(event.get("cat", "")),
            start,
            end,
            _thread(event),
            calls.get(_correlation(event), (_thread(event), start)),
        )
        for event, start, end in found
    ]


def _thread(event: dict[str, Any]) -> Thread:
    return str(event.get("pid")), str(event.get("tid"))


def _correlation(event: dict[str, Any]) -> object:
    args = event.get("args")
    return args.get("correlation") if isinstance(args, dict) else None


def _spans(events: list[_Event], loop: Thread, rank: int) -> Iterator[tuple[Span, int]]:
    """Yield what ran, each with the time at which it was launched."""
    on_device = [each for each in events if each.category in ON_DEVICE]
    updates, backwards = (_Ranges(each for each in events if each.name.startswith(name)) for name in (UPDATE, BACKWARD))
    for each in on_device or _outermost(events):
        thread, at_ns = each.launched
        kind = collective_of(each.name)
        if kind is None and each.category in ("gpu_memcpy", "gpu_memset"):
            kind = "copy"
        lane = "compute" if kind in (None, "copy") else "communication"
        if kind is None:
            is_backward = backwards.cover(thread, at_ns) or thread != loop
            kind = "optimizer" if updates.cover(thread, at_ns) else "B" if is_backward else "F"
        yield Span(rank, lane, NAMES.get(kind, kind), kind, each.start_ns, each.end_ns), at_ns


def collective_of(name: str) -> str | None:
    """Return the kind of a collective's event ("ncclDevKernel_AllReduce_...", "gloo:all_reduce"), or None."""
    if not name.lower().startswith(("nccl", "gloo:", "mpi:", "ucc:", "shared:")):
        return None
    found = (kind for kind, pattern in COLLECTIVES.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, "collective")


def _outermost(events: Iterable[_Event]) -> Iterator[_Event]:
    """Yield a CPU's operators that stand in no other, and its collectives."""
    ends: dict[Thread, int] = {}
    for each in sorted(events, key=lambda one: (one.start_ns, -one.end_ns)):
        if collective_of(each.name):
            yield each
        elif (
            each.category == "cpu_op" and not each.name.startswith(CALLS) and each.start_ns >= ends.get(each.thread, 0)
        ):
            ends[each.thread] = each.end_ns
            yield each


class _Ranges:
    """Times that some events cover, by thread; events that overlap are one."""

    def __init__(self, events: Iterable[_Event]) -> None:
        self._edges: dict[Thread, list[int]] = {}
        for each in sorted(events, key=lambda one: one.start_ns):
            edges = self._edges.setdefault(each.thread, [])
            if edges and each.start_ns <= edges[-1]:
                edges[-1] = max(edges[-1], each.end_ns)
            else:
                edges += [each.start_ns, each.end_ns]

    def cover(self, thread: Thread, at_ns: int) -> bool:
        """Return whether one of the events lasts at a time."""
        return bool(np.searchsorted(self._edges.get(thread, []), at_ns, side="right") % 2)


def _merged(spans: list[Span], close_ns: float) -> list[Span]:
    """Make one span of those of a kind and a lane that follow each other closely."""
    merged: list[Span] = []
    last: dict[str, int] = {}
    for span in sorted(spans, key=lambda each: each.start_ns):
        at = last.get(span.lane)
        before = merged[at] if at is not None else None
        is_pass = span.kind in NAMES
        if (
            at is not None
            and before
            and is_pass
            and before.kind == span.kind
            and span.start_ns - before.end_ns <= close_ns
        ):
            merged[at] = before._replace(end_ns=max(before.end_ns, span.end_ns))
        else:
            last[span.lane] = len(merged)
            merged.append(span)
    return merged
