"""When each part of a step happens: what timing a step returns, and what traces and memory read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.gradients.buckets import Transfer
from simulator.pipeline.schedule_arrays import ScheduleArrays, last_actions

Ints = NDArray[np.int64]
Pair = tuple[int, int]


class ShardCall(NamedTuple):
    """A call that moves shards, or a copy between a device and its host.

    Attributes:
        lane: "gather", "scatter", "host" or "compute".
        name: what a reader sees, such as "all_gather unit 3".
        kind: all_gather, reduce_scatter, all_reduce or copy.
        start_ns: start.
        end_ns: end.
        num_bytes: of the whole that is gathered, scattered or summed, padding included.
        sent_bytes: what a rank's link carries for it, one way, by ring algorithms.
        microbatch: micro-batch, or -1.
    """

    lane: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    num_bytes: int
    sent_bytes: float = 0.0
    microbatch: int = -1


def part_of(pair: Pair, part: Pair, whole_ns: int) -> Pair:
    """Return when a part of something runs, which ran from pair[0] to pair[1] and was costed at `whole_ns`."""
    begin, length, whole = pair[0], pair[1] - pair[0], max(1, whole_ns)
    return begin + length * part[0] // whole, begin + length * part[1] // whole


class BucketTimes(NamedTuple):
    """Start and end, in nanoseconds, of the parts of one bucket's way to the mean.

    Attributes:
        pack: copying the gradients together, and encoding them.
        all_reduce: the all-reduce, or what compression sends in its place.
        unpack: decoding, and copying the mean out.
        between: work before the bucket sends a second time (PowerSGD); None where it does not.
        later: the second time.
        after: work on the rank while that travels.
    """

    pack: Pair
    all_reduce: Pair
    unpack: Pair
    between: Pair | None = None
    later: Pair | None = None
    after: Pair | None = None

    @property
    def computing(self) -> tuple[Pair, ...]:
        """The parts that keep the compute lane busy."""
        if self.between is None or self.after is None:
            return self.pack, self.unpack
        return self.pack, self.between, self.after, self.unpack


class BucketParts(NamedTuple):
    """Which operations the parts of a stage's buckets are, and when operations start and end.

    Attributes:
        operations: of each bucket, its parts in the order of `BucketTimes`.
        start_ns: of every operation of the step.
        end_ns: of every operation of the step.
    """

    operations: Sequence[tuple[int, ...]]
    start_ns: Ints
    end_ns: Ints

    def times(self) -> tuple[BucketTimes, ...]:
        """Return the times of each bucket."""
        parts = np.fromiter(chain.from_iterable(self.operations), np.int64)
        pairs = zip(self.start_ns[parts].tolist(), self.end_ns[parts].tolist(), strict=True)
        return tuple([BucketTimes(*islice(pairs, len(each))) for each in self.operations])


class AskedCall(NamedTuple):
    """A call or a copy that a rank asked for: a part of an operation of `whole_ns`, after `so_far_ns` of it; 0: all."""

    lane: str
    name: str
    cost: Transfer
    operation: int
    microbatch: int = -1
    so_far_ns: int = 0
    whole_ns: int = 0


class CallParts(NamedTuple):
    """What a rank asked for, and when operations start and end."""

    asked: Sequence[AskedCall]
    start_ns: Ints
    end_ns: Ints

    def times(self) -> tuple[ShardCall, ...]:
        """Return when each call runs."""
        found = []
        for (lane, name, cost, _, microbatch, so_far, whole), *pair in zip(self.asked, *self._pairs(), strict=True):
            ends = part_of((pair[0], pair[1]), (so_far, so_far + cost.duration_ns), whole or cost.duration_ns)
            found.append(ShardCall(lane, name, cost.kind, *ends, cost.num_bytes, cost.sent_bytes, microbatch))
        return tuple(found)

    def span_ns(self) -> tuple[int, ...]:
        """Return when the first of them starts and the last one ends; nothing if there is none."""
        starts, ends = self._pairs()
        return (min(starts), max(ends)) if starts else ()

    def _pairs(self) -> tuple[list[int], list[int]]:
        operations = [each.operation for each in self.asked]
        return self.start_ns[operations].tolist(), self.end_ns[operations].tolist()


@dataclass(frozen=True, eq=False)
class Timing:
    """Start and end of everything on one replica's ranks, in nanoseconds.

    Attributes:
        order: the actions of the pipeline.
        start_ns: start of each action.
        end_ns: end of each action.
        send_end_ns: end of the message that leaves after each action; the action's own end where none does.
        send_start_ns: its start.
        parts: of the buckets of each stage, in the order of the stage's buckets.
        optimizer: start and end of the update on each rank.
        called: of each rank, what sharding adds; none of them is a bucket's. Those of lane "compute" are copies of
            gradients to where they are scattered from.
        layers: action, layer of the stage (0 first), start and end, one row per layer that an action runs; None where
            passes were timed whole.
    """

    order: ScheduleArrays
    start_ns: Ints
    end_ns: Ints
    send_start_ns: Ints
    send_end_ns: Ints
    parts: tuple[BucketParts, ...]
    optimizer: tuple[Pair, ...]
    called: tuple[tuple[CallParts, ...], ...]
    layers: Ints | None = None

    @cached_property
    def buckets(self) -> tuple[tuple[BucketTimes, ...], ...]:
        """The times of each stage's buckets: thousands, which only traces and what looks behind a step read."""
        return tuple(parts.times() for parts in self.parts)

    @cached_property
    def calls(self) -> tuple[tuple[ShardCall, ...], ...]:
        """The times of each rank's calls, of which a large plan has thousands."""
        return tuple(tuple(call for part in parts for call in part.times()) for parts in self.called)

    @cached_property
    def spans_ns(self) -> tuple[tuple[int, ...], ...]:
        """Of each rank, when its first call starts and its last one ends, of each of its parts."""
        return tuple(tuple(when for part in parts for when in part.span_ns()) for parts in self.called)

    @property
    def rows(self) -> Ints:
        """The layers of a step that was timed layer by layer."""
        assert self.layers is not None, "passes were timed whole"
        return self.layers

    @cached_property
    def finishing(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each rank, in the order in which their gradients are complete."""
        return finishing(self.order)

    def buckets_of(self, rank: int) -> tuple[BucketTimes, ...]:
        """Return all that a rank exchanges: its stages' buckets, in the order in which the stages are complete."""
        return tuple(times for stage in self.finishing[rank] for times in self.buckets[stage])


def finishing(order: ScheduleArrays) -> tuple[tuple[int, ...], ...]:
    """Return each rank's stages, in the order in which their gradients are complete."""
    last = last_actions(order)
    places = (np.searchsorted(order.offsets, last, side="right") - 1).tolist()
    found: list[list[int]] = [[] for _ in range(order.num_ranks)]
    for stage in np.argsort(last, kind="stable").tolist():
        found[places[stage]].append(stage)
    return tuple(map(tuple, found))
