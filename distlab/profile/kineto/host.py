"""Sections and steps of a rank's host, from the annotations and operators that torch.profiler saw.

Sections come from annotations (`record_function("forward")`, "## backward ##"), and else from what torch marks by
itself: the DataLoader, autograd's functions, `Optimizer.step`. Operators before a backward that no section holds are
its forward.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distlab.profile.kineto.event import Event, Range

Ints = NDArray[np.int64]
_SECTION = re.compile(r"\W*(data|forward|backward|sync|optimizer)\W*", re.IGNORECASE)
_STEP = re.compile(r"ProfilerStep\W*(\d+)")
_AUTOGRAD = "autograd::engine::evaluate_function"


def section_of(name: str) -> str:
    """Return the section that an annotation names, or ""."""
    if match := _SECTION.fullmatch(name):
        return match[1].lower()
    if name.startswith("Optimizer."):
        return "optimizer"
    return "data" if name.startswith("enumerate(DataLoader") else ""


def sections_on_host(host: Sequence[Event]) -> list[Range]:
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


def main_thread(host: Sequence[Event]) -> str:
    """Return the thread that runs the program: most of the operators that are not autograd's."""
    count = Counter(
        event.thread for event in host if event.category == "cpu_op" and not event.name.startswith("autograd")
    )
    return count.most_common(1)[0][0] if count else ""


def steps_on_host(host: Sequence[Event], sections: Sequence[Range]) -> list[tuple[str, int, int]]:
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


def _backward(operators: Sequence[Event]) -> list[Range]:
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


def _forward(operators: Sequence[Event], sections: Sequence[Range]) -> list[Range]:
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
