"""What each rank of a data-parallel step holds, sends and does at any moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distlab.trace import Span
from simulator.units import name_ranks
from simulator.viz.timeline.facts import Interval

ABSENT, FILLING, OWN, SENT, MEAN = "absent", "filling", "own", "sent", "mean"


class BucketSum(NamedTuple):
    """One all-reduce of gradients as one rank sees it; times in seconds since the step began.

    Attributes:
        name: what it carries.
        num_bytes: payload.
        fill_s: when backward begins to make its gradients.
        ready_s: when the last of them is there.
        start_s: when the all-reduce, or what compression sends in its place, began on this rank.
        end_s: when the mean was there.
        came_s: when each rank began it; before the last has come nothing can be averaged.
        arrived_s: when it had come, but was not decoded yet.
        earlier: when the backward passes of earlier micro-batches make their part of its gradients.
    """

    name: str
    num_bytes: int
    fill_s: float
    ready_s: float
    start_s: float
    end_s: float
    came_s: tuple[tuple[int, float], ...] = ()
    arrived_s: float = float("inf")
    earlier: tuple[Interval, ...] = ()

    @property
    def made(self) -> tuple[Interval, ...]:
        """When each micro-batch's backward makes its part of the gradients."""
        return (*self.earlier, (self.fill_s, self.ready_s))

    @property
    def met_s(self) -> float:
        """When the last rank had come."""
        return max([self.start_s, *(start for _, start in self.came_s)])

    def missing(self, at_s: float) -> tuple[int, ...]:
        """Return the ranks that have not come yet."""
        return tuple(rank for rank, start in self.came_s if start > at_s)


class RankStep(NamedTuple):
    """What one rank did in the step; intervals in seconds since the step began, in order.

    Attributes:
        rank: who.
        spans: its compute lane, waits too.
        reductions: its all-reduces in the order in which they were sent.
        hidden: communication while the rank computes.
        exposed: communication while it does not.
    """

    rank: int
    spans: tuple[Span, ...]
    reductions: tuple[BucketSum, ...]
    hidden: tuple[Interval, ...]
    exposed: tuple[Interval, ...]

    @property
    def hidden_s(self) -> float:
        """Seconds of communication under compute."""
        return sum(end - start for start, end in self.hidden)

    @property
    def exposed_s(self) -> float:
        """Seconds of communication in which the rank computes nothing."""
        return sum(end - start for start, end in self.exposed)

    @property
    def exposed_share(self) -> float:
        """Exposed over all communication, 0 where there is none."""
        total = self.hidden_s + self.exposed_s
        return self.exposed_s / total if total else 0.0


class RankMoment(NamedTuple):
    """What a rank holds and does at one moment.

    Attributes:
        doing: in words, such as "backward 62 %".
        activations: share of the step's most activations that is kept.
        updated: whether the weights are the new ones.
        gradients: state of each all-reduce's gradients (ABSENT, FILLING, OWN, SENT or MEAN), and how far it is (0-1).
    """

    doing: str
    activations: float
    updated: bool
    gradients: tuple[tuple[str, float], ...]


class TrainStep(NamedTuple):
    """A data-parallel step, rank by rank."""

    ranks: tuple[RankStep, ...]
    duration_s: float


def held_at(own: RankStep, at_s: float) -> RankMoment:
    """Return what the rank holds and does at a moment."""
    update = [span for span in own.spans if span.kind == "optimizer"]
    updated = bool(update) and at_s >= max(span.end_ns for span in update) / 1e9
    gradients = tuple(_state(reduction, at_s) for reduction in own.reductions)
    most = max([_kept(own.spans, end) for _, end in passes(own.spans, "F")], default=0.0)
    kept = max(0.0, _kept(own.spans, at_s)) / most if most > 0 else 0.0
    return RankMoment(_doing(own, at_s), kept, updated, gradients)


def passes(spans: Sequence[Span], kind: str) -> tuple[Interval, ...]:
    """Return the whole forward ("F") or backward ("B") passes, one per micro-batch, in seconds, in order."""
    found: list[Interval] = []
    before: tuple[str, int] | None = None
    for span in spans:
        if span.kind not in ("F", "B"):
            continue
        if span.kind == kind:
            begin = found.pop()[0] if before == (kind, span.microbatch) else span.start_ns / 1e9
            found.append((begin, span.end_ns / 1e9))
        before = (span.kind, span.microbatch)
    return tuple(found)


def best_moment(step: TrainStep) -> float:
    """Return a moment worth a picture: an all-reduce under way while backward still runs, if there is one."""
    own = step.ranks[0]
    for interval in (*sorted(own.hidden, key=lambda i: i[0] - i[1])[:1], *own.exposed[:1]):
        return interval[0] + 0.55 * (interval[1] - interval[0])
    return step.duration_s / 2


def _state(reduction: BucketSum, at_s: float) -> tuple[str, float]:
    if at_s >= reduction.end_s:
        return MEAN, 1.0
    if at_s >= reduction.start_s:
        lasts = min(reduction.arrived_s, reduction.end_s) - reduction.met_s
        return SENT, min(max(0.0, at_s - reduction.met_s) / lasts, 1.0) if lasts > 0 else 0.0
    if at_s >= reduction.ready_s:
        return OWN, 1.0
    made = reduction.made
    if at_s <= made[0][0]:
        return ABSENT, 0.0
    return FILLING, sum(_share(interval, at_s) for interval in made) / len(made)


def _share(interval: Interval, at_s: float) -> float:
    """Return how much of an interval has passed."""
    start, end = interval
    return min(max((at_s - start) / (end - start), 0.0), 1.0) if end > start else float(at_s >= end)


def _kept(spans: Sequence[Span], at_s: float) -> float:
    """Return the activations that are kept, as a share of those of all micro-batches."""
    return _done(spans, "F", at_s) - _done(spans, "B", at_s)


def _done(spans: Sequence[Span], kind: str, at_s: float) -> float:
    """Return the share of a kind's time that has passed."""
    own = [span for span in spans if span.kind == kind]
    total = sum(span.duration_s for span in own)
    past = sum(min(max(at_s - span.start_ns / 1e9, 0.0), span.duration_s) for span in own)
    return past / total if total else 0.0


def _doing(own: RankStep, at_s: float) -> str:
    now = [span for span in own.spans if span.start_ns / 1e9 <= at_s < span.end_ns / 1e9]
    for span in now:
        if span.kind in ("F", "B"):
            return _doing_pass(own.spans, span, at_s)
        if span.kind == "optimizer":
            return "updates weights"
        if span.kind != "wait":
            return span.name if span.kind in ("copy", "encode", "decode") else span.kind
    if own.spans and at_s >= max(span.end_ns for span in own.spans) / 1e9:
        return "step done"
    sent = [reduction for reduction in own.reductions if reduction.start_s <= at_s < reduction.end_s]
    if not sent:
        return "waits"
    late = sent[0].missing(at_s)
    return f"waits for {name_ranks(late)}" if late else f"waits for {sent[0].name}"


def _doing_pass(spans: Sequence[Span], now: Span, at_s: float) -> str:
    """Return how far a pass is, and of which micro-batch where there are several."""
    words = "forward" if now.kind == "F" else "backward"
    whole = passes(spans, now.kind)
    number = next(index for index, (_, end) in enumerate(whole) if at_s < end)
    start, end = whole[number]
    inside = [span for span in spans if start <= span.start_ns / 1e9 and span.end_ns / 1e9 <= end]
    text = f"{words} {_done(inside, now.kind, at_s) * 100:.0f} %"
    return text if len(whole) == 1 else f"{text} of micro-batch {number + 1}"
