"""A trace of some ranks, taken apart: seconds of each rank, step and section."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distlab.profile.calls import Calls, calls_of
from distlab.profile.sections import SECTIONS, STEP, SectionMoments, covers, moments_of, windows_of
from distlab.trace import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Profile:
    """A trace of some ranks, taken apart.

    Attributes:
        trace: what the ranks did, on one clock.
        windows_ns: of each rank, start and end of each step [S, 2].
        notes: what a reader must know, such as how far the clocks were apart; one sentence each.
    """

    trace: Trace
    windows_ns: dict[int, Ints]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, trace: Trace, notes: tuple[str, ...] = ()) -> Profile:
        """Find the steps of a trace.

        Raises:
            ValueError: it has no spans, or ranks have no step in common.
        """
        return cls(trace, windows_of(trace), notes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, ascending."""
        return tuple(self.windows_ns)

    @cached_property
    def calls(self) -> Calls:
        """The calls of all ranks, matched."""
        return calls_of(self.trace, self.windows_ns).with_first_ends()

    @cached_property
    def moments(self) -> dict[int, SectionMoments]:
        """Each rank's time in pieces."""
        found, travels, late, shares = {}, self.calls.travels, self.calls.late, self.shares
        for rank, windows in self.windows_ns.items():
            mine, own = travels.rank == rank, self.trace.select(self.trace.rank == rank)
            found[rank] = moments_of(own, windows, travels.take(mine), late.take(mine), shares[mine])
        return found

    @cached_property
    def shares(self) -> NDArray[np.bool_]:
        """Which calls carry gradients or parameters, so that computation could hide them.

        Not those of tensor, context and expert parallelism, whose results the next layer needs. They are known by their
        lane, or as all-reduces of a group of which a third or more begin in forward.
        """
        spans = self.calls.spans
        shared = spans.is_word("kind", "all_reduce", "reduce_scatter", "all_gather")
        shared &= ~spans.is_word("lane", "tensor", "context", "expert")
        forward = self.trace.select(self.trace.is_word("kind", "F") & self.trace.is_word("lane", "compute"))
        inside = np.zeros(len(spans), bool)
        for rank in self.ranks:
            passes = forward.select(forward.rank == rank)
            cuts = np.unique(np.concatenate([passes.start_ns, passes.end_ns]))
            if len(cuts):
                place = np.searchsorted(cuts, spans.start_ns, side="right") - 1
                open_ = np.append(covers(cuts, passes), False)
                inside |= (spans.rank == rank) & (place >= 0) & open_[place]
        sums = spans.is_word("kind", "all_reduce")
        in_forward, all_ = (
            np.bincount(spans.lane[rows], minlength=1 + len(spans.words)) for rows in (inside & sums, sums)
        )
        return shared & ~(sums & (3 * in_forward >= np.maximum(all_, 1))[spans.lane])

    @cached_property
    def seconds(self) -> Floats:
        """Seconds by rank, step and section [R, S, 7]."""
        return np.stack([_sums(each, self.num_steps) for each in self.moments.values()])

    @property
    def num_steps(self) -> int:
        """Steps that all ranks have."""
        return len(next(iter(self.windows_ns.values())))

    @property
    def step_s(self) -> Floats:
        """Seconds of each step, on its slowest rank [S]."""
        longest: Floats = self.seconds.sum(axis=2).max(axis=0)
        return longest

    def mean_s(self) -> dict[int, dict[str, float]]:
        """Return each rank's seconds by section, the mean over steps; "other" only where it is something."""
        mean = self.seconds.mean(axis=1)
        shown = [index for index, name in enumerate(SECTIONS) if name != "other" or mean[:, index].any()]
        return {rank: {SECTIONS[i]: float(mean[row, i]) for i in shown} for row, rank in enumerate(self.ranks)}

    def middle_step(self) -> Trace:
        """Return what all ranks did in the step of median length: spans that lie in it, for a picture."""
        order = np.argsort(self.step_s, kind="stable")
        step = int(order[len(order) // 2])
        parts = []
        for rank, windows in self.windows_ns.items():
            start, end = windows[step]
            own = self.trace.select(self.trace.rank == rank)
            inside = (own.start_ns >= start) & (own.end_ns <= end) & ~own.is_word("lane", STEP)
            parts.append(own.select(inside))
        return Trace.concatenate(parts)

    def overlap(self, rank: int) -> tuple[float, float]:
        """Return the seconds per step in which bytes travel, and those of them in which the rank computes too."""
        pieces = self.moments[rank]
        moving = pieces.length_ns[pieces.travels].sum()
        hidden = pieces.length_ns[pieces.travels & pieces.computes].sum()
        return float(moving) / 1e9 / self.num_steps, float(hidden) / 1e9 / self.num_steps


def _sums(pieces: SectionMoments, num_steps: int) -> Floats:
    code = pieces.step * len(SECTIONS) + pieces.section
    total: Floats = np.bincount(code, pieces.length_ns / 1e9, num_steps * len(SECTIONS)).astype(np.float64)
    return total.reshape(num_steps, len(SECTIONS))
