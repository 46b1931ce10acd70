"""Buckets in a graph of operations: passes that buckets leave during, and the exchange after a rank's last pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

from simulator.engine.task_graph import COMMUNICATION, COMPUTE, NONE, Graph
from simulator.pipeline.schedule_arrays import F
from simulator.stage.stage import Stage
from simulator.stage.step_times import layer_times


class Exchanges:
    """Adds passes and exchanges of gradients to a graph, in the order in which each rank's program asks for them.

    Attributes:
        graph: the operations so far.
        buckets: of each stage, and of each of its buckets that has been received, the operations that are the fields of
            `BucketTimes`.
    """

    def __init__(self, stages: Sequence[Stage], sync: str) -> None:
        """`sync` says when gradients are exchanged (see `Plan.gradient_sync`)."""
        self.graph, self.stages, self.sync = Graph(), stages, sync
        self.buckets: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        self._packs: defaultdict[int, list[int]] = defaultdict(list)  # of each sent; its wire is the operation behind

    def layers(self, number: int, kind: int, factor: float | None, need: int, *, completes: bool) -> list[int]:
        """Add a pass of a stage layer by layer; where it completes gradients, buckets leave during it.

        Return the operation of each layer in the order in which they run, and the last operation of the pass.
        """
        stage = self.stages[number]
        durations = layer_times(stage.passes_ns[kind], factor)
        waiting = stage.buckets if completes and self.sync == "overlapped" else ()
        so_far, sent, last = len(self.graph), 0, NONE
        lane: list[int] = []
        duration: list[int] = []
        waits: list[int] = []
        found: list[int] = []
        for layer in range(len(durations)) if kind == F else range(len(durations) - 1, -1, -1):
            last = so_far + len(lane)
            found.append(last)
            lane.append(COMPUTE)
            duration.append(durations[layer])
            waits.append(NONE if waits else need)
            while sent < len(waiting) and waiting[sent].layer >= layer:
                last = so_far + len(lane)
                lane += (COMPUTE, COMMUNICATION)
                duration += (waiting[sent].pack_ns, waiting[sent].duration_ns)
                waits += (NONE, last)
                self._packs[number].append(last)
                sent += 1
        self.graph.extend(stage.rank, lane, duration, waits)
        return [*found, last]

    def exchange(self, rank: int, numbers: Sequence[int]) -> None:
        """Exchange the complete gradients of a rank's stages: send those not sent yet, then receive."""
        if self.sync != "overlapped":
            for number in numbers:
                for index in range(len(self.stages[number].buckets)):
                    self._start(number, index)
                    if self.sync == "per_parameter":
                        self._receive(rank, [number])
        if self.sync != "per_parameter":
            self._receive(rank, numbers)

    def take(self, number: int) -> list[tuple[int, ...]]:
        """Return the operations of a stage's buckets, and forget them: its next backward exchanges again."""
        self._packs.pop(number, None)
        return self.buckets.pop(number, [])

    def _start(self, number: int, index: int) -> None:
        """Pack a bucket and send it."""
        bucket, rank = self.stages[number].buckets[index], self.stages[number].rank
        pack = self.graph.add(rank, COMPUTE, bucket.pack_ns)
        self.graph.add(rank, COMMUNICATION, bucket.duration_ns, needs=[pack])
        self._packs[number].append(pack)

    def _receive(self, rank: int, numbers: Sequence[int]) -> None:
        """Unpack each bucket of these stages that was sent, once it has come.

        Buckets that send a second time do so one after the other, once all have come the first time.
        """
        add = self.graph.add
        packs = [pack for number in numbers for pack in self._packs[number][len(self.buckets[number]) :]]
        wires = [pack + 1 for pack in packs]
        buckets = [
            bucket
            for number in numbers
            for bucket in self.stages[number].buckets[len(self.buckets[number]) : len(self._packs[number])]
        ]
        again: dict[int, tuple[int, ...]] = {}
        for place, bucket in enumerate(buckets):
            if (later := bucket.later) is not None:
                between = add(rank, COMPUTE, later.between_ns, needs=wires)
                wire = add(rank, COMMUNICATION, later.duration_ns, needs=[between])
                again[place] = (between, wire, add(rank, COMPUTE, later.after_ns))
        waits = [again[place][1] if place in again else wire for place, wire in enumerate(wires)] if again else wires
        first, count = len(self.graph), len(packs)
        unpacks = [bucket.unpack_ns for bucket in buckets]
        self.graph.extend(rank, [COMPUTE] * count, unpacks, waits)
        done = zip(packs, wires, range(first, first + count), strict=True)
        rows: Iterator[tuple[int, ...]] = done
        if again:
            rows = ((*row, *again.get(place, ())) for place, row in enumerate(done))
        for number in numbers:
            self.buckets[number] += islice(rows, len(self._packs[number]) - len(self.buckets[number]))
