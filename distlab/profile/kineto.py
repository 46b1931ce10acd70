"""torch.profiler's traces (Kineto), each rank's made a Trace: on a CPU the host computes, on a GPU the kernels do.

Sections come from annotations (`record_function("forward")`, "## backward ##"), and else from what torch marks by
itself: the DataLoader, autograd's functions, `Optimizer.step`. Operators before a backward that no section holds are
its forward.

On a CPU sections are the host's. It is blocked where none of its operators runs while a call is under way.

On a GPU each kernel belongs to the section, and to the step, in which the host launched it: launch and kernel have the
same correlation. Where a GPU is idle because its next kernel was not launched yet, it waits for the host.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.profile.sections import HOST, KIND_OF, STEP, WAIT_FOR_HOST, covers
from distlab.trace import Span, Trace

CATEGORIES = ("cpu_op", "user_annotation", "kernel", "cuda_runtime", "gpu_memcpy", "gpu_user_annotation")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
SIZES = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2}
KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
}
"""Words in the names of calls, the longer ones before those that they contain."""

LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime")
LEAST_WAIT_NS = 100_000  # shorter gaps between operators are Python's
Ints = NDArray[np.int64]
_SECTION = re.compile(r"\W*(data|forward|backward|sync|optimizer)\W*", re.IGNORECASE)
_STEP = re.compile(r"ProfilerStep\W*(\d+)")
_AUTOGRAD = "autograd::engine::evaluate_function"


class KinetoEvent(NamedTuple):
    """Something that lasted, in nanoseconds, on a thread of the host or a stream of a GPU."""

    start_ns: int
    end_ns: int
    name: str
    category: str
    thread: str
    args: dict[str, Any]


class Range(NamedTuple):
    """A section on the host."""

    start_ns: int
    end_ns: int
    section: str


def is_kineto(document: Any, events: Sequence[Any]) -> bool:
    """Whether torch.profiler wrote the file."""
    if isinstance(document, dict) and ("distributedInfo" in document or "baseTimeNanoseconds" in document):
        return True
    return any(isinstance(event, dict) and event.get("cat") in CATEGORIES for event in events)


def events_of(document: Any, events: Sequence[Any]) -> list[KinetoEvent]:
    """Return the complete events (X), on the clock of the file's base time; others last no time.

    Raises:
        ValueError: an event is damaged.
    """
    base = document.get("baseTimeNanoseconds", 0) if isinstance(document, dict) else 0
    base_ns, found = base if type(base) is int else 0, []
    for index, event in enumerate(events):
        try:
            if event.get("ph") != "X":
                continue
            start_ns = round(1000 * float(event["ts"])) + base_ns
            end_ns = start_ns + round(1000 * float(event.get("dur", 0)))
            if not -(2**63) < start_ns <= end_ns < 2**63:
                raise ValueError(f"it is from {start_ns} to {end_ns} ns")
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            wanted = "expected an object with ts and dur in microseconds, dur of at least 0"
            raise ValueError(f"event {index} is {str(event)[:80]}: {error}; {wanted}") from None
        args = event.get("args")
        words = str(event.get("name", "")), str(event.get("cat", "")), f"{event.get('pid')} {event.get('tid')}"
        found.append(KinetoEvent(start_ns, end_ns, *words, args if isinstance(args, dict) else {}))
    return found


def is_call(name: str) -> bool:
    """Whether an event is a call of nccl or gloo that is under way."""
    return name.startswith(("nccl", "gloo:"))


def call_kind(name: str, args: dict[str, Any]) -> str:
    """Return the kind of a call, such as "all_reduce" for "nccl:all_reduce" or "ncclDevKernel_AllReduce_Sum_f32"."""
    told = f"{args.get('Collective name', '')} {name}".lower().replace("_", "")
    return next((kind for word, kind in KINDS.items() if word in told), "call")


def num_bytes(call: KinetoEvent) -> int:
    """Return the bytes that a rank gives to a call, as far as the trace says."""
    told = call.args
    try:
        if elements := told.get("In msg nelems"):
            return int(elements * SIZES.get(str(told.get("dtype", "")).lower(), 1))
        pairs = zip(told["Input Dims"], told["Input type"], strict=False)  # of gloo, with record_shapes=True
        return sum(math.prod(shape) * SIZES.get(str(kind).lower(), 1) for shape, kind in pairs if shape)
    except (KeyError, TypeError):
        return 0


def lane_of(call: KinetoEvent, world_size: int) -> str:
    """Return the lane of a call: one for each group of ranks."""
    size, ranks = call.args.get("Group size"), call.args.get("Process Group Ranks")
    return "communication" if ranks is None or size == world_size else f"communication of ranks {ranks}"


def section_of(name: str) -> str:
    """Return the section that an annotation names, or ""."""
    if match := _SECTION.fullmatch(name):
        return match[1].lower()
    if name.startswith("Optimizer."):
        return "optimizer"
    return "data" if name.startswith("enumerate(DataLoader") else ""


def sections_on_host(host: Sequence[KinetoEvent]) -> list[Range]:
    """Return the sections, in order of their start; `host` is in that order too."""
    others = [event for event in host if not event.category.startswith(("cpu_op", "cuda", "hip"))]
    marked = [(event, section_of(event.name)) for event in others]
    found = [Range(event.start_ns, event.end_ns, section) for event, section in marked if section]
    operators = [event for event in host if event.category == "cpu_op"]
    names = {section for *_, section in found}
    if "backward" not in names:
        found += _backward(operators)
    if "forward" not in names:
        found += _forward(operators, sorted(found))
    return sorted(found)


def main_thread(host: Sequence[KinetoEvent]) -> str:
    """Return the thread that runs the program: most of the operators that are not autograd's."""
    count = Counter(
        event.thread for event in host if event.category == "cpu_op" and not event.name.startswith("autograd")
    )
    return count.most_common(1)[0][0] if count else ""


def steps_on_host(host: Sequence[KinetoEvent], sections: Sequence[Range]) -> list[tuple[str, int, int]]:
    """Return name, start and end of each step: as the profiler marked them, or else from update to update."""
    marked = [(f"step {match[1]}", event) for event in host if (match := _STEP.fullmatch(event.name))]
    if marked:
        return [(name, event.start_ns, event.end_ns) for name, event in marked]
    ends = [event.end_ns for event in host if event.name.startswith("Optimizer.step")]
    ends = ends or [one.end_ns for one in sections if one.section == "optimizer"]
    starts = [min(event.start_ns for event in host), *ends] if ends else []
    return [(f"update {number}", *pair) for number, pair in enumerate(zip(starts, ends, strict=False))]


def paint(ranges: Sequence[Range]) -> tuple[Ints, list[str]]:
    """Cut time where a section begins or ends, and name the innermost section of each piece ("" for none)."""
    cuts = np.unique(np.array([time for one in ranges for time in one[:2]], np.int64))
    names = np.full(len(cuts), "", dtype="<U9")
    for one in ranges:  # in order of their start: what begins later lies inside
        first, last = np.searchsorted(cuts, one[:2])
        names[first:last] = one.section
    return cuts, names.tolist()


def section_at(cuts: Ints, names: Sequence[str], time_ns: int) -> str:
    """Return the section in which a moment lies, of what `paint` returned."""
    place = int(np.searchsorted(cuts, time_ns, side="right")) - 1
    return names[place] if place >= 0 else ""


def _backward(operators: Sequence[KinetoEvent]) -> list[Range]:
    """Join autograd's functions to passes; an operator of the program between two of them ends a pass."""
    autograd = [event for event in operators if event.name.startswith(_AUTOGRAD)]
    if not autograd:
        return []
    main = main_thread(operators)
    own = np.array([event.start_ns for event in operators if event.thread == main], np.int64)
    found = [Range(autograd[0].start_ns, autograd[0].end_ns, "backward")]
    for event in autograd[1:]:
        reached = found[-1].end_ns
        if event.start_ns > reached and np.searchsorted(own, event.start_ns) > np.searchsorted(own, reached):
            found.append(Range(event.start_ns, event.end_ns, "backward"))
        else:
            found[-1] = found[-1]._replace(end_ns=max(reached, event.end_ns))
    return found


def _forward(operators: Sequence[KinetoEvent], sections: Sequence[Range]) -> list[Range]:
    """Take the operators of the main thread between two sections, of which the second is a backward, as its forward."""
    main = main_thread(operators)
    starts = np.array([one.start_ns for one in sections], np.int64)
    ends = np.maximum.accumulate([one.end_ns for one in sections]) if sections else starts
    found: dict[int, Range] = {}
    for event in operators:
        middle = (event.start_ns + event.end_ns) // 2  # the beginning may touch a section's end, after rounding
        place = int(np.searchsorted(starts, middle, side="right"))
        if event.thread != main or (place and middle < ends[place - 1]):
            continue
        if place < len(sections) and sections[place].section == "backward":
            before = found.get(place, Range(event.start_ns, event.end_ns, "forward"))
            found[place] = before._replace(end_ns=max(before.end_ns, event.end_ns))
    return list(found.values())


def read_rank(events: Sequence[KinetoEvent], rank: int, world_size: int) -> Trace:
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
    host: Sequence[KinetoEvent],
    sections: Sequence[Range],
    steps: Sequence[tuple[str, int, int]],
    calls: Sequence[KinetoEvent],
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
    kernels: Sequence[KinetoEvent],
    host: Sequence[KinetoEvent],
    sections: Sequence[Range],
    steps: Sequence[tuple[str, int, int]],
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


def _trace(events: Sequence[KinetoEvent]) -> Trace:
    return Trace.from_spans(Span(0, "", "", "", event.start_ns, event.end_ns) for event in events)
