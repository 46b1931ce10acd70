"""A trace of some ranks, taken apart: the calls that they make together, and seconds of each rank, step and section.

`distlab.trace.span` says which calls are one. All ranks leave a collective at nearly the same time, so the first that
sees its end is right: a rank that computes sees the end of its call when it looks the next time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distlab.comm.agree import ranks_in_words
from distlab.profile.sections import SECTIONS, STEP, Ints, SectionMoments, covers, moments_of, windows_of
from distlab.trace import CriticalPath, Trace
from distlab.trace.span import RECEIVES, TOGETHER, noted_twice, number_calls

Floats = NDArray[np.float64]
NOT_CALLS = ("compute", "wait", "step", "host", "loader")  # lanes that hold no calls


@dataclass(frozen=True)
class Calls:
    """The calls of all ranks.

    Attributes:
        spans: a row for each call of each rank.
        step: of each row, the number of the step in which it began.
        number: of each row, the same number on every rank that takes part; -1: no partner is known.
    """

    spans: Trace
    step: Ints
    number: Ints

    @cached_property
    def arrival_ns(self) -> Ints:
        """When the last rank of each row's call had come; the row's own start where no partner is known."""
        spans, known = self.spans, self.number >= 0
        last = np.full(int(self.number.max(initial=-1)) + 1, np.iinfo(np.int64).min)
        makes = known & ~spans.is_word("kind", *RECEIVES)
        np.maximum.at(last, self.number[makes], spans.start_ns[makes])
        arrival = spans.start_ns.copy()
        arrival[known] = np.maximum(arrival[known], last[self.number[known]])
        return np.minimum(arrival, spans.end_ns)

    @property
    def travels(self) -> Trace:
        """The calls while bytes travel: from the arrival of the last rank on."""
        return replace(self.spans, start_ns=self.arrival_ns)

    @property
    def late(self) -> Trace:
        """The calls while they wait for a different rank: until the last one has come."""
        return replace(self.spans, end_ns=self.arrival_ns)

    @property
    def alone_ns(self) -> Ints:
        """How long each call had the wire: not while the call before it, of the same rank and lane, was under way."""
        spans, begin = self.spans, self.arrival_ns.copy()
        for rank, lane in set(zip(spans.rank.tolist(), spans.lane.tolist(), strict=True)):
            rows = np.flatnonzero((spans.rank == rank) & (spans.lane == lane))
            before = np.maximum.accumulate(spans.end_ns[rows])[:-1]
            begin[rows[1:]] = np.maximum(begin[rows[1:]], before)
        return np.asarray(np.maximum(0, spans.end_ns - begin))

    def with_first_ends(self) -> Calls:
        """Let each collective end when the first rank saw its end, after all had come; clocks have to be aligned."""
        spans = self.spans
        rows = np.flatnonzero((self.number >= 0) & spans.is_word("kind", *TOGETHER))
        number, size = self.number[rows], int(self.number.max(initial=-1)) + 1
        first, came = np.full(size, np.iinfo(np.int64).max), np.full(size, np.iinfo(np.int64).min)
        np.minimum.at(first, number, spans.end_ns[rows])
        np.maximum.at(came, number, spans.start_ns[rows])
        ends = spans.end_ns.copy()
        ends[rows] = np.minimum(ends[rows], np.maximum(first, came)[number])
        return Calls(replace(spans, end_ns=np.maximum(ends, spans.start_ns)), self.step, self.number)

    def take(self, rows: NDArray[np.bool_]) -> Calls:
        """Keep some rows."""
        return Calls(self.spans.take(rows), self.step[rows], self.number[rows])


def calls_of(trace: Trace, windows: dict[int, Ints]) -> Calls:
    """Find the calls of all ranks that begin in a step, and which of them are one.

    What a technique and a recorder both noted counts once, as the recorder saw it.
    """
    spans = trace.select(~trace.is_word("lane", *NOT_CALLS))
    spans = spans.take(np.argsort(spans.start_ns, kind="stable"))
    spans = spans.select(~np.array(noted_twice(list(spans)), bool))
    step = np.full(len(spans), -1, np.int64)
    for rank, own in windows.items():
        mine = spans.rank == rank
        place = np.searchsorted(own[:, 0], spans.start_ns[mine], side="right") - 1
        step[mine] = np.where((place >= 0) & (spans.start_ns[mine] < own[place, 1]), place, -1)
    spans, step = spans.take(step >= 0), step[step >= 0]
    return Calls(spans, step, np.array(number_calls(spans, step.tolist()), np.int64))


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
        made = cls(trace, windows_of(trace), notes)
        if not made.unmarked:
            return made
        note = f"{ranks_in_words(made.unmarked)}: no section is marked and no kernel traced, so that nobody can tell "
        note += "what makes steps slow; mark sections (distlab.profile.Profiler), or trace with torch.profiler"
        return replace(made, notes=(note, *notes))

    @cached_property
    def unmarked(self) -> tuple[int, ...]:
        """The ranks of which nothing says when they compute: their traces hold calls alone."""
        trace = self.trace
        working = trace.select(trace.is_word("lane", "compute") & ~trace.is_word("kind", "wait"))
        return tuple(rank for rank in self.ranks if rank not in working.ranks)

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
        in_forward, all_ = (np.bincount(spans.lane[rows], None, len(spans.words)) for rows in (inside & sums, sums))
        return shared & ~(sums & (3 * in_forward >= np.maximum(all_, 1))[spans.lane])

    @cached_property
    def seconds(self) -> Floats:
        """Seconds by rank, step and section [R, S, 7]."""
        return np.stack([_sums(each, self.num_steps) for each in self.moments.values()])

    @property
    def has_steps(self) -> bool:
        """Whether the trace says where a step begins or ends; else all of it counts as one."""
        return bool(self.trace.is_word("kind", STEP, "optimizer").any())

    @property
    def num_steps(self) -> int:
        """Steps that all ranks have."""
        return len(next(iter(self.windows_ns.values())))

    @property
    def step_s(self) -> Floats:
        """Seconds of each step, on its slowest rank [S]."""
        return np.asarray(self.seconds.sum(axis=2).max(axis=0))

    def mean_s(self) -> dict[int, dict[str, float]]:
        """Return each rank's seconds by section, the mean over steps; "other" only where it is something."""
        mean = self.seconds.mean(axis=1)
        shown = [index for index, name in enumerate(SECTIONS) if name != "other" or mean[:, index].any()]
        return {rank: {SECTIONS[i]: float(mean[row, i]) for i in shown} for row, rank in enumerate(self.ranks)}

    @property
    def middle(self) -> int:
        """The number of the step of median length."""
        return int(np.argsort(self.step_s, kind="stable")[self.num_steps // 2])

    @cached_property
    def critical_path(self) -> CriticalPath:
        """What decides how long the middle step is."""
        return self.middle_step().critical_path()

    def middle_step(self) -> Trace:
        """Return what all ranks did in the step of median length: spans that lie in it, for a picture."""
        parts = []
        for rank, windows in self.windows_ns.items():
            start, end = windows[self.middle]
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
