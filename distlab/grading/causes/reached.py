"""Whose numbers reached whom, by the recorded calls: a rank cannot know what no call brought it."""

from __future__ import annotations

from collections.abc import Iterable

from distlab.grading.diagnosis.traffic import calls
from distlab.grading.exercise import Evidence

_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather")
Flow = frozenset[tuple[int, int]]  # pairs: something of the first rank may have reached the second


def flow(evidence: Evidence) -> Flow:
    """Return whose numbers may have reached whom in a run, directly or through others, whatever the order of calls."""
    pairs: set[tuple[int, int]] = set()
    ranks = range(evidence.world_size)
    for rank in ranks:
        for call in calls(evidence, rank):
            if call.op == "send":
                pairs.add((rank, call.peer))
            elif call.op in _FROM_ROOT:
                pairs |= {(call.peer, other) for other in call.group}
            elif call.op in _TO_ROOT:
                pairs |= {(other, call.peer) for other in call.group}
            elif call.op != "recv" and call.num_bytes:
                pairs |= {(one, other) for one in call.group for other in call.group}
    for through in ranks:  # Warshall's transitive closure
        into, out = ([pair for pair in pairs if pair[at] == through] for at in (1, 0))
        pairs |= {(one, other) for one, _ in into for _, other in out}
    return frozenset((one, other) for one, other in pairs if one != other)


def not_reached(got: Flow, wanted: Flow, wrong: Iterable[int], num_calls: int) -> str:
    """Say which rank with wrong results got nothing of another one, which the reference's calls bring it; or "".

    Args:
        got: of the answer's run.
        wanted: of the reference's.
        wrong: ranks with wrong results.
        num_calls: that were drawn.
    """
    for rank in wrong:
        lacks = sorted(one for one, other in wanted - got if other == rank)
        if lacks:
            whose = " and ".join(f"rank {one}" for one in lacks)
            text = f"in {num_calls} drawn calls nothing went from {whose} to rank {rank}, directly or through others"
            return f"{text}: its result is made of theirs too, so a message or a collective is missing."
    return ""
