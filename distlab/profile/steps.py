"""Where each rank's steps begin and end.

Spans of kind "step" say so. Without them a step ends with its "optimizer" span. A trace that has one update, or none,
is one step for all ranks together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distlab.trace import Trace

Ints = NDArray[np.int64]
STEP = "step"


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
