"""How a step is taken apart: each moment of each rank belongs to one section.

A rank's step is cut where anything begins or ends. Between two cuts nothing changes, so one question settles each
piece. The first line that holds names its section:

    blocked in a call, and some rank has not come yet   idle       (it waits for a rank, not for bytes)
    blocked in a call                                   sync
    computing: the span's own kind                      data, forward, backward, optimizer, other
    bytes on the way, and nothing computed              sync       (a GPU does not block: it just has nothing to do)
    the host loads, and a GPU has nothing to do         data
    none of these                                       idle

So the sections of a step sum to the step. What overlaps is counted separately: of the time in which bytes travel,
`hidden` is the part under computation. Bytes travel from the arrival of a call's last rank on (`calls`): that a
call was made early hides nothing.

Spans of kind "step" say where a step begins and ends. Without them a step ends with its "optimizer" span. A trace that
has one update, or none, is one step for all ranks together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.trace import Trace

SECTIONS = ("data", "forward", "backward", "sync", "optimizer", "other", "idle")
KINDS = {"data": ("data",), "forward": ("F",), "backward": ("B", "I", "W"), "optimizer": ("optimizer",)}
KIND_OF = {"data": "data", "forward": "F", "backward": "B", "sync": "wait", "optimizer": "optimizer"}
HOST = "host"  # the lane of what a host does while its GPU works
WAIT_FOR_HOST = "wait for the host"
STEP = "step"
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class SectionMoments(NamedTuple):
    """One rank's time in pieces, a row each.

    Attributes:
        length_ns: how long it is.
        step: the number of its step.
        section: the number of its section in SECTIONS.
        computes: whether the rank computes.
        hides: whether it computes, or waits for its host, which no call makes longer.
        travels: whether bytes of a call are on the way.
        shares: whether bytes of gradients or parameters are.
    """

    length_ns: Ints
    step: Ints
    section: Ints
    computes: Bools
    hides: Bools
    travels: Bools
    shares: Bools


def moments_of(trace: Trace, windows_ns: Ints, travels: Trace, late: Trace, shares: Bools) -> SectionMoments:
    """Cut a rank's steps into pieces, and name each one's section.

    Args:
        trace: the rank's spans.
        windows_ns: start and end of each step [S, 2].
        travels: its calls, from the arrival of the last rank on.
        late: its calls, until then.
        shares: which of the calls carry gradients or parameters.
    """
    times = [trace.start_ns, trace.end_ns, travels.start_ns, travels.end_ns, windows_ns.ravel()]
    cuts = np.unique(np.concatenate(times))
    cuts = cuts[(cuts >= windows_ns.min()) & (cuts <= windows_ns.max())]
    waits, host = trace.is_word("kind", "wait"), trace.is_word("lane", HOST)
    working = trace.is_word("lane", "compute") & ~waits
    known = {name: working & trace.is_word("kind", *kinds) for name, kinds in KINDS.items()}
    known["other"] = working & ~np.any(list(known.values()), axis=0)
    covered = {name: covers(cuts, trace.select(rows)) for name, rows in known.items()}
    blocked, moving = covers(cuts, trace.select(waits & ~host)), covers(cuts, travels)
    loads = covers(cuts, trace.select(host & trace.is_word("kind", "data")))
    tests = [blocked & covers(cuts, late) & ~moving, blocked, *covered.values(), moving, loads]
    names = ["idle", "sync", *covered, "sync", "data"]
    section = np.select(tests, [np.int64(SECTIONS.index(name)) for name in names], SECTIONS.index("idle"))
    computes = np.any(list(covered.values()), axis=0) & ~blocked
    step = np.searchsorted(windows_ns[:, 0], cuts[:-1], side="right") - 1
    inside = cuts[:-1] < windows_ns[step, 1]
    hides = computes | covers(cuts, trace.select(host & waits))
    carried = covers(cuts, travels.select(shares))
    columns = (np.diff(cuts), step, section, computes, hides, moving, carried)
    return SectionMoments(*(column[inside] for column in columns))


def covers(cuts: Ints, spans: Trace) -> Bools:
    """Return of each piece between two cuts whether at least one of the spans, which end at cuts, covers it."""
    change = np.zeros(len(cuts) + 1, np.int64)
    np.add.at(change, np.searchsorted(cuts, spans.start_ns), 1)
    np.add.at(change, np.searchsorted(cuts, spans.end_ns), -1)
    return np.cumsum(change)[: len(cuts) - 1] > 0


def windows_of(trace: Trace) -> dict[int, Ints]:
    """Return start and end of each rank's steps [S, 2], in nanoseconds; every rank has as many steps.

    Steps that only some ranks have are left out: marked steps go by their names, updates by their order.

    Raises:
        ValueError: the trace has no spans, or ranks have marked no step in common.
    """
    if not len(trace):
        raise ValueError("the trace has no spans; profile at least one step")
    ranks = {rank: trace.select(trace.rank == rank) for rank in trace.ranks}
    if trace.is_word("kind", STEP).any():
        return _marked(ranks)
    updates = {rank: np.unique(own.end_ns[own.is_word("kind", "optimizer")]) for rank, own in ranks.items()}
    num_steps = min(map(len, updates.values()))
    if num_steps <= 1:
        whole = np.array([[trace.start_ns.min(), trace.end_ns.max()]])
        return dict.fromkeys(ranks, whole)
    found = {}
    for rank, own in ranks.items():
        ends = updates[rank][:num_steps]
        found[rank] = np.stack([np.concatenate([[own.start_ns.min()], ends[:-1]]), ends], axis=1)
    return found


def _marked(ranks: dict[int, Trace]) -> dict[int, Ints]:
    steps: dict[int, dict[str, tuple[int, int]]] = {}
    for rank, own in ranks.items():
        spans = own.select(own.is_word("kind", STEP))
        steps[rank] = {span.name: (span.start_ns, span.end_ns) for span in spans}
    first, *others = steps.values()
    common = [name for name in first if all(name in other for other in others)]
    if not common:
        told = "; ".join(f"rank {rank}: {', '.join(list(own)[:3]) or 'none'}" for rank, own in steps.items())
        raise ValueError(f"the ranks have no step in common ({told}); profile the same steps on every rank")
    return {rank: np.array([own[name] for name in common], np.int64) for rank, own in steps.items()}
