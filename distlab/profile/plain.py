"""The plainest profile: each moment of a rank belongs to one of four, and the four sum to the step.

A step is cut where anything begins or ends. Between two cuts nothing changes, so that one look settles each piece:

    computing   the rank computes; what is sent meanwhile costs nothing
    waiting     it computes nothing, and its call cannot begin: a different rank has not come yet
    exposed     it computes nothing, and bytes are on the way
    idle        none of these

A call's bytes travel once its last rank has come: that one waits for nobody. Here all ranks make the same calls in the
same order. `Profile` reads real traces, of steps with sections, calls of groups, and clocks that differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from distlab.trace import Span

PARTS = ("computing", "waiting", "exposed", "idle")
Interval = tuple[int, int]


def plain_profile(spans: Iterable[Span]) -> list[dict[str, int]]:
    """Return where each rank's time goes, in nanoseconds: from the first start of any rank to the last end of any.

    Args:
        spans: of one step; their lane is "compute" or "communication".

    Raises:
        ValueError: the ranks do not make equally many calls.
    """
    spans = sorted(spans, key=lambda span: span.start_ns)
    cuts = sorted({time for span in spans for time in (span.start_ns, span.end_ns)})
    computes: list[list[Interval]] = [[] for _ in range(1 + max(span.rank for span in spans))]
    calls: list[list[Interval]] = [[] for _ in computes]
    for span in spans:
        (computes if span.lane == "compute" else calls)[span.rank].append((span.start_ns, span.end_ns))
    complete_ns = [max(start for start, _ in each) for each in zip(*calls, strict=True)]  # its last rank has come
    profile = []
    for own, sent in zip(computes, calls, strict=True):
        parts = dict.fromkeys(PARTS, 0)
        for start, end in pairwise(cuts):
            under_way = [number for number, (begin, over) in enumerate(sent) if begin <= start < over]
            if any(begin <= start < over for begin, over in own):
                part = "computing"
            elif not under_way:
                part = "idle"
            else:
                part = "exposed" if any(complete_ns[number] <= start for number in under_way) else "waiting"
            parts[part] += end - start
        profile.append(parts)
    return profile
