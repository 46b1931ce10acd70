"""torch.profiler's traces (Kineto), each rank's made a Trace: on a CPU the host computes, on a GPU the kernels do.

Sections come from annotations (`record_function("forward")`, "## backward ##"), and else from what torch marks by
itself: the DataLoader, autograd's functions, `Optimizer.step`. Operators before a backward that no section holds are
its forward: those of the program's thread, on which steps are marked, or, without marks, most operators run (most
kernels are launched) outside of autograd's functions. With a GPU autograd has a thread of its own, a busy one.

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

from distlab.profile.sections import HOST, KIND_OF, STEP, WAIT_FOR_HOST, Ints, covers
from distlab.trace import Span, Trace

CATEGORIES = ("cpu_op", "user_annotation", "kernel", "cuda_runtime", "gpu_memcpy", "gpu_user_annotation")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime")
SIZES = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2}
KINDS = (  # of calls; their names contain these words, and a longer one may contain a shorter one
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"),
    *("send", "recv", "scatter", "gather", "reduce"),
)
LEAST_WAIT_NS = 100_000  # shorter gaps between operators are Python's
_SECTION = re.compile(r"\W*(data|forward|backward|sync|optimizer)\W*", re.IGNORECASE)
_STEP = re.compile(r"ProfilerStep\W*(\d+)")
_AUTOGRAD = "autograd::engine::evaluate_function"
_CALL = re.compile(rf"nccl|\w+:_?({'|'.join(KINDS)})")  # "gloo:all_reduce", and so of any backend


class KinetoEvent(NamedTuple):
    """Something that lasted, in nanoseconds, on a thread of the host or a stream of a GPU."""

    start_ns: int
    end_ns: int
    name: str
    category: str
    thread: str
    args: dict[str, Any]

    @property
    def is_call(self) -> bool:
        """Whether it is a call of a backend that is under way."""
        return _CALL.match(self.name) is not None

    @property
    def is_autograd(self) -> bool:
        """Whether it is a function of backward: torch tells in which thread its forward ran."""
        forward = self.args.get("Fwd thread id", 0)
        return self.name.startswith(_AUTOGRAD) or (isinstance(forward, int) and forward > 0)


class Range(NamedTuple):
    """A section, or a step, on the host."""

    start_ns: int
    end_ns: int
    name: str


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


def read_rank(events: Sequence[KinetoEvent], rank: int, world_size: int) -> Trace:
    """Return what a rank did.

    Raises:
        ValueError: nothing in the trace computes or communicates.
    """
    events = sorted(events, key=lambda event: event.start_ns)
    host = [event for event in events if event.category not in ON_GPU and not event.category.startswith("gpu_")]
    kernels = [event for event in events if event.category in ON_GPU]
    operators = [event for event in host if event.category == "cpu_op" and not event.is_call]
    main = _main_thread(host)
    program = [event for event in operators if event.thread == main]
    sections = _sections(host, operators, program)
    steps = _steps(host, sections)
    calls = [event for event in kernels or host if event.is_call]
    spans = _on_gpu(kernels, host, sections, steps) if kernels else _on_cpu(program, sections, steps, calls)
    spans += [_call(event, world_size) for event in calls]
    if not spans:
        raise ValueError("no section, kernel or call is in the trace; profile at least one training step")
    return Trace.from_spans(span._replace(rank=rank) for span in spans)


def _main_thread(host: Sequence[KinetoEvent]) -> str:
    """Return the program's thread, "" where nothing tells."""
    marks = Counter(event.thread for event in host if _STEP.fullmatch(event.name))
    own, until = Counter[str](), dict[str, int]()  # of each thread: what counts, and the end of autograd's function
    counted = LAUNCHES if any(event.category in LAUNCHES for event in host) else ("cpu_op",)
    for event in host:
        if event.category == "cpu_op" and event.is_autograd:
            until[event.thread] = max(event.end_ns, until.get(event.thread, 0))
        elif event.category in counted and event.start_ns >= until.get(event.thread, 0):
            own[event.thread] += 1
    return next((thread for found in (marks, own) for thread, _ in found.most_common(1)), "")


def _call(event: KinetoEvent, world_size: int) -> Span:
    """Return a call with its kind, on a lane for each group of ranks, and its rank's bytes as far as the trace says."""
    told = event.args
    words = f"{told.get('Collective name', '')} {event.name}".lower().replace("_", "")
    kind = next((kind for kind in KINDS if kind.replace("_", "") in words), "call")
    size, ranks = told.get("Group size"), told.get("Process Group Ranks")
    lane = "communication" if ranks is None or size == world_size else f"communication of ranks {ranks}"
    try:
        if elements := told.get("In msg nelems"):
            num_bytes = int(elements * SIZES.get(str(told.get("dtype", "")).lower(), 1))
        else:
            pairs = zip(told["Input Dims"], told["Input type"], strict=False)  # of gloo, with record_shapes=True
            num_bytes = sum(math.prod(shape) * SIZES.get(str(kind).lower(), 1) for shape, kind in pairs if shape)
    except (KeyError, TypeError):
        num_bytes = 0
    return Span(0, lane, event.name, kind, event.start_ns, event.end_ns, num_bytes)


def _section_of(name: str) -> str:
    """Return the section that an annotation names, or ""."""
    if match := _SECTION.fullmatch(name):
        return match[1].lower()
    if name.startswith("Optimizer."):
        return "optimizer"
    return "data" if name.startswith("enumerate(DataLoader") else ""


def _sections(
    host: Sequence[KinetoEvent], operators: Sequence[KinetoEvent], program: Sequence[KinetoEvent]
) -> list[Range]:
    """Return the sections on the host, in order of their start; `program` are its operators but for autograd's."""
    found = [
        Range(event.start_ns, event.end_ns, section)
        for event in host
        if not event.category.startswith(("cpu_op", "cuda", "hip")) and (section := _section_of(event.name))
    ]
    names = {section for *_, section in found}
    if "backward" not in names:
        found += _backward(operators, program)
    if "forward" not in names:
        found += _forward(program, sorted(found))
    return sorted(found)


def _backward(operators: Sequence[KinetoEvent], program: Sequence[KinetoEvent]) -> list[Range]:
    """Join autograd's functions to passes; an operator of the program between two of them ends a pass."""
    own = np.array([event.start_ns for event in program], np.int64)
    found: list[Range] = []
    for event in operators:
        if not event.is_autograd:
            continue
        reached = found[-1].end_ns if found else event.start_ns
        is_apart = event.start_ns > reached and np.searchsorted(own, event.start_ns) > np.searchsorted(own, reached)
        if is_apart or not found:
            found.append(Range(event.start_ns, event.end_ns, "backward"))
        else:
            found[-1] = found[-1]._replace(end_ns=max(reached, event.end_ns))
    return found


def _forward(program: Sequence[KinetoEvent], sections: Sequence[Range]) -> list[Range]:
    """Take the program's operators between two sections, of which the second is a backward, as its forward."""
    starts = np.array([one.start_ns for one in sections], np.int64)
    ends = np.maximum.accumulate([one.end_ns for one in sections]) if sections else starts
    found: dict[int, Range] = {}
    for event in program:
        middle = (event.start_ns + event.end_ns) // 2  # the beginning may touch a section's end, after rounding
        place = int(np.searchsorted(starts, middle, side="right"))
        is_free = not place or middle >= ends[place - 1]
        if is_free and place < len(sections) and sections[place].name == "backward":
            before = found.get(place, Range(event.start_ns, event.end_ns, "forward"))
            found[place] = before._replace(end_ns=max(before.end_ns, event.end_ns))
    return list(found.values())


def _steps(host: Sequence[KinetoEvent], sections: Sequence[Range]) -> list[Range]:
    """Return the steps on the host: as the profiler marked them, or else from update to update."""
    matches = [(event, _STEP.fullmatch(event.name)) for event in host]
    if marked := [Range(event.start_ns, event.end_ns, f"step {match[1]}") for event, match in matches if match]:
        return marked
    ends = [event.end_ns for event in host if event.name.startswith("Optimizer.step")]
    ends = ends or [one.end_ns for one in sections if one.name == "optimizer"]
    starts = [host[0].start_ns, *ends] if ends else []
    return [Range(*pair, f"update {number}") for number, pair in enumerate(zip(starts, ends, strict=False))]


def _paint(ranges: Sequence[Range]) -> tuple[Ints, list[str]]:
    """Cut time where a section begins or ends; name each piece's innermost one, and "" for none, also at the end."""
    cuts = np.unique(np.array([time for one in ranges for time in one[:2]], np.int64))
    names = np.full(len(cuts) + 1, "", dtype="<U9")
    for one in ranges:  # in order of their start: what begins later lies inside
        first, last = np.searchsorted(cuts, one[:2])
        names[first:last] = one.name
    return cuts, names.tolist()


def _on_cpu(
    program: Sequence[KinetoEvent], sections: Sequence[Range], steps: Sequence[Range], calls: Sequence[KinetoEvent]
) -> list[Span]:
    spans = [Span(0, STEP, step.name, STEP, *step[:2]) for step in steps]
    cuts, names = _paint(sections)
    for name, start, end in zip(names, cuts.tolist(), cuts[1:].tolist(), strict=False):
        if name:
            spans.append(Span(0, "wait" if name == "sync" else "compute", name, KIND_OF[name], start, end))
    return spans + _waits(_trace(program), _trace(calls))


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
    kernels: Sequence[KinetoEvent], host: Sequence[KinetoEvent], sections: Sequence[Range], steps: Sequence[Range]
) -> list[Span]:
    """Return kernels with the sections of their launches, waits for the host, and steps from first kernel to first."""
    launched = {
        repr(event.args["correlation"]): event.start_ns
        for event in host
        if event.category in LAUNCHES and "correlation" in event.args
    }
    cuts, names = _paint(sections)
    spans = [Span(0, HOST, "data", "data", *one[:2]) for one in sections if one.name == "data"]
    loaded = [span.end_ns for span in spans]
    first_ns: dict[int, int] = {}  # of each step: where its first kernel starts
    begins = [step.start_ns for step in steps]
    busy_until = next((kernel.start_ns for kernel in kernels if not kernel.is_call), kernels[0].start_ns)
    for kernel in kernels:
        launch = launched.get(repr(kernel.args.get("correlation")), kernel.start_ns)
        number = int(np.searchsorted(begins, launch, side="right")) - 1
        if number >= 0 and launch < steps[number].end_ns:
            first_ns.setdefault(number, kernel.start_ns)
        if kernel.is_call:
            continue
        section = names[int(np.searchsorted(cuts, launch, side="right")) - 1]
        kind = KIND_OF.get(section, "") if section != "sync" else "copy"
        spans.append(Span(0, "compute", kernel.name, kind, kernel.start_ns, kernel.end_ns))
        if kernel.start_ns > busy_until and launch >= busy_until:
            before = int(np.searchsorted(loaded, kernel.start_ns, side="right")) - 1
            begin = max(busy_until, loaded[before] if before >= 0 else busy_until)
            spans.append(Span(0, HOST, WAIT_FOR_HOST, "wait", begin, kernel.start_ns))
        busy_until = max(busy_until, kernel.end_ns)
    edges = [*(first_ns[number] for number in sorted(first_ns)), max(kernel.end_ns for kernel in kernels)]
    for number, start, end in zip(sorted(first_ns), edges, edges[1:], strict=False):
        if start < end:
            spans.append(Span(0, STEP, steps[number].name, STEP, start, end))
    return spans


def _trace(events: Sequence[KinetoEvent]) -> Trace:
    return Trace.from_spans(Span(0, "", "", "", event.start_ns, event.end_ns) for event in events)
