"""One rank's events of torch.profiler as a Trace: on a CPU the host computes, on a GPU the kernels do.

On a CPU sections are the host's. It is blocked where none of its operators runs while a call is under way.

On a GPU each kernel belongs to the section, and to the step, in which the host launched it: launch and kernel have the
same correlation. Where a GPU is idle because its next kernel was not launched yet, it waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distlab.profile.findings.exposed import WAIT_FOR_HOST
from distlab.profile.kineto.event import ON_GPU, Event, Range, call_kind, is_call, lane_of, num_bytes
from distlab.profile.kineto.host import main_thread, paint, section_at, sections_on_host, steps_on_host
from distlab.profile.sections import HOST, KIND_OF, covers
from distlab.profile.steps import STEP
from distlab.trace import Span, Trace

LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime")
LEAST_WAIT_NS = 100_000  # shorter gaps between operators are Python's


def read_rank(events: Sequence[Event], rank: int, world_size: int) -> Trace:
    """Return what a rank did.

    Raises:
        ValueError: nothing in the trace computes or communicates.
    """
    events = sorted(events, key=lambda event: event.start_ns)
    host = [event for event in events if event.category not in ON_GPU and not event.category.startswith("gpu_")]
    kernels = [event for event in events if event.category in ON_GPU]
    sections = sections_on_host(host)
    steps = steps_on_host(host, sections)
    calls = [event for event in kernels or host if event.category != "cpu_op" and is_call(event.name)]
    own = _on_gpu(kernels, host, sections, steps) if kernels else _on_cpu(host, sections, steps, calls)
    for call in calls:
        lane, kind = lane_of(call, world_size), call_kind(call.name, call.args)
        own.append(Span(0, lane, call.name, kind, call.start_ns, call.end_ns, num_bytes(call)))
    if not own:
        raise ValueError("no section, operator or call is in the trace; profile at least one training step")
    return Trace.from_spans(span._replace(rank=rank) for span in own)


def _on_cpu(
    host: Sequence[Event], sections: Sequence[Range], steps: Sequence[tuple[str, int, int]], calls: Sequence[Event]
) -> list[Span]:
    spans = [Span(0, STEP, name, STEP, start, end) for name, start, end in steps]
    cuts, names = paint(sections)
    for name, start, end in zip(names, cuts.tolist(), cuts[1:].tolist(), strict=False):
        if name:
            spans.append(Span(0, "wait" if name == "sync" else "compute", name, KIND_OF[name], start, end))
    main = main_thread(host)
    operators = [event for event in host if event.category == "cpu_op" and event.thread == main]
    return spans + _waits(_trace(operators), _trace(calls))


def _waits(operators: Trace, calls: Trace) -> list[Span]:
    """Return where no operator runs while a call is under way."""
    cuts = np.unique(np.concatenate([operators.start_ns, operators.end_ns, calls.start_ns, calls.end_ns]))
    if len(cuts) < 2:
        return []
    waits = np.concatenate([[False], covers(cuts, calls) & ~covers(cuts, operators), [False]])
    edges = np.flatnonzero(np.diff(waits))  # where waiting begins, and ends
    pairs = cuts[edges].reshape(-1, 2).tolist()
    return [Span(0, "wait", "wait", "wait", *pair) for pair in pairs if pair[1] - pair[0] >= LEAST_WAIT_NS]


def _on_gpu(
    kernels: Sequence[Event], host: Sequence[Event], sections: Sequence[Range], steps: Sequence[tuple[str, int, int]]
) -> list[Span]:
    launched = {
        repr(event.args["correlation"]): event.start_ns
        for event in host
        if event.category in LAUNCHES and "correlation" in event.args
    }
    cuts, names = paint(sections)
    spans = [Span(0, HOST, "data", "data", one.start_ns, one.end_ns) for one in sections if one.section == "data"]
    loaded = [span.end_ns for span in spans]
    starts: dict[int, list[int]] = {}  # of each step, those of its kernels
    begins = [start for _, start, _ in steps]
    busy_until = next((kernel.start_ns for kernel in kernels if not is_call(kernel.name)), kernels[0].start_ns)
    for kernel in kernels:
        launch = launched.get(repr(kernel.args.get("correlation")), kernel.start_ns)
        number = int(np.searchsorted(begins, launch, side="right")) - 1
        if number >= 0 and launch < steps[number][2]:
            starts.setdefault(number, []).append(kernel.start_ns)
        if is_call(kernel.name):
            continue
        section = section_at(cuts, names, launch)
        kind = KIND_OF.get(section, "") if section != "sync" else "copy"
        spans.append(Span(0, "compute", kernel.name, kind, kernel.start_ns, kernel.end_ns))
        if kernel.start_ns > busy_until and launch >= busy_until:
            before = int(np.searchsorted(loaded, kernel.start_ns, side="right")) - 1
            begin = max(busy_until, loaded[before] if before >= 0 else busy_until)
            spans.append(Span(0, HOST, WAIT_FOR_HOST, "wait", begin, kernel.start_ns))
        busy_until = max(busy_until, kernel.end_ns)
    return spans + _gpu_steps(steps, starts, max(kernel.end_ns for kernel in kernels))


def _gpu_steps(steps: Sequence[tuple[str, int, int]], starts: dict[int, list[int]], last_ns: int) -> list[Span]:
    """Return the steps as the GPU sees them: from a step's first kernel to the next step's."""
    numbers = sorted(starts)
    edges = [min(starts[number]) for number in numbers] + [last_ns]
    return [
        Span(0, STEP, steps[number][0], STEP, *pair)
        for number, *pair in zip(numbers, edges, edges[1:], strict=False)
        if pair[0] < pair[1]
    ]


def _trace(events: Sequence[Event]) -> Trace:
    return Trace.from_spans(Span(0, "", "", "", event.start_ns, event.end_ns) for event in events)
