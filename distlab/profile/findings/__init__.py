"""A finding: what makes steps slow, in words, with its cost.

`uneven` finds ranks that hold the others up. Here is what ranks wait for that they need not: communication that nothing
hides, calls that are too small, the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distlab.comm.agree import ranks_in_words
from distlab.profile.profile import Profile
from distlab.profile.sections import HOST, SECTIONS, WAIT_FOR_HOST

FLOOR = 0.05
"""Of a step: what costs less is not said."""

SMALL_BYTES = 64_000  # a call of fewer bytes takes its latency and hardly more
GOOD_BYTES = 1_000_000  # a bucket that is worth a call
MOST_HIDDEN = 0.75  # of the bytes' time: the last bucket is full when backward ends
FEW_CALLS = 8
HOST_SHARE = 0.10


@dataclass(frozen=True)
class Finding:
    """One thing that makes steps slow.

    Attributes:
        kind: "straggler", "imbalance", "slow loader", "missing overlap", "small buckets" or "host-bound".
        text: what is slow, and on which ranks.
        ranks: the ranks whose fault it is; () where it is all of them.
        cost_s: seconds that each step would save without it.
        share: the same, of the median step.
        advice: what to do about it.
    """

    kind: str
    text: str
    ranks: tuple[int, ...]
    cost_s: float
    share: float
    advice: str

    def __str__(self) -> str:
        cost = f"{self.share * 100:.0f} % of every step ({self.cost_s * 1e3:.3g} ms)"
        return f"{self.kind}: {self.text}: {cost}. {self.advice}"


def find_missing_overlap(profile: Profile) -> Iterator[Finding]:
    """Find gradients, or gathered parameters, that travel while nothing is computed although something could be.

    The rank that hides most counts. On the others bytes travel late because that one comes late.
    """
    step_s, costs, told = float(np.median(profile.step_s)), [], []
    for row, rank in enumerate(profile.ranks):
        pieces = profile.moments[rank]
        moving = pieces.length_ns[pieces.shares].sum() / 1e9 / profile.num_steps
        hidden = pieces.length_ns[pieces.shares & pieces.hides].sum() / 1e9 / profile.num_steps
        passes = [SECTIONS.index("backward")] + [SECTIONS.index("forward")] * _gathers(profile)
        room = profile.seconds[row][:, passes].sum(axis=1).mean()
        possible = min(MOST_HIDDEN * moving, room)
        costs.append(possible - hidden if hidden < 0.4 * possible else 0.0)
        told.append((hidden, moving))
    best = int(np.argmin(costs))
    cost_s = costs[best]
    if cost_s >= FLOOR * step_s:
        hidden, moving = told[best]
        what = "gathered parameters and gradients" if _gathers(profile) else "gradients"
        text = f"computation hides {hidden / moving * 100:.0f} % of the {moving * 1e3:.3g} ms in which {what} travel"
        advice = "Send buckets during backward" + (", gather ahead of the layer." if _gathers(profile) else ".")
        yield Finding("missing overlap", text, (), cost_s, cost_s / step_s, advice)


def find_small_buckets(profile: Profile) -> Iterator[Finding]:
    """Find many small calls whose fixed cost is a part of the step, where fewer calls could carry the same bytes."""
    calls = profile.calls.take(profile.shares)
    if not len(calls.spans):
        return
    each = len(profile.ranks) * profile.num_steps
    num_calls, num_bytes = len(calls.spans) / each, float(calls.spans.num_bytes.sum()) / each
    fewer = max(1.0, np.ceil(num_bytes / GOOD_BYTES))
    if num_bytes == 0 or num_calls < max(FEW_CALLS, 2 * fewer):
        return
    latency_s = _latency_s(calls.spans.num_bytes, calls.alone_ns / 1e9)
    exposed = [pieces.length_ns[pieces.shares & ~pieces.computes].sum() for pieces in profile.moments.values()]
    exposed_s = float(np.median(exposed)) / 1e9 / profile.num_steps
    step_s = float(np.median(profile.step_s))
    cost_s = min((num_calls - fewer) * latency_s, exposed_s)
    if cost_s >= FLOOR * step_s:
        text = f"{num_calls:.0f} calls carry {num_bytes / num_calls / 1e3:.3g} kB each, and each takes "
        text += f"{latency_s * 1e6:.3g} us before its first byte"
        yield Finding("small buckets", text, (), cost_s, cost_s / step_s, "Use buckets of 1 MB or more.")


def find_host_bound(profile: Profile) -> Iterator[Finding]:
    """Find GPUs that wait for their host to launch the next kernel."""
    trace, step_s = profile.trace, float(np.median(profile.step_s))
    gaps = trace.select(trace.is_word("lane", HOST) & trace.is_word("name", WAIT_FOR_HOST))
    waited = {
        rank: float((gaps.end_ns - gaps.start_ns)[gaps.rank == rank].sum()) / 1e9 / profile.num_steps
        for rank in profile.ranks
    }
    cost_s = max(waited.values())
    if cost_s < HOST_SHARE * step_s:
        return
    ranks = tuple(rank for rank, waits in waited.items() if waits >= 0.5 * cost_s)
    kernels = trace.select(np.isin(trace.rank, ranks) & trace.is_word("lane", "compute"))
    number = len(kernels) / len(ranks) / profile.num_steps
    lasts_us = float(np.median(kernels.end_ns - kernels.start_ns)) / 1e3
    verb = "waits" if len(ranks) == 1 else "wait"
    text = f"the GPU of {ranks_in_words(ranks)} {verb} for the host, which launches {number:,.0f} kernels per step, "
    text += f"half of them of {lasts_us:.3g} us or less"
    advice = "Fuse kernels (torch.compile), use CUDA graphs, or give each step more work."
    yield Finding("host-bound", text, ranks, cost_s, cost_s / step_s, advice)


def _gathers(profile: Profile) -> bool:
    return bool((profile.calls.spans.is_word("kind", "all_gather") & profile.shares).any())


def _latency_s(num_bytes: NDArray[np.int64], seconds: NDArray[np.float64]) -> float:
    """Estimate what a call takes before its first byte: as the smallest do, or as the larger ones promise."""
    small = num_bytes <= SMALL_BYTES
    if small.mean() >= 0.1:
        return float(np.mean(seconds[small]))  # not the median: ends may be seen several at a time
    order = np.argsort(num_bytes)
    third = max(1, len(order) // 3)
    low, high = order[:third], order[-third:]
    (few, many), (short, long) = ([float(np.median(of[rows])) for rows in (low, high)] for of in (num_bytes, seconds))
    if many < 2 * few:
        return 0.0
    return max(0.0, short - (long - short) / (many - few) * few)
