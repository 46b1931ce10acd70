"""Buckets in a graph of operations: passes that buckets leave during, and the exchange after a rank's last pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from simulator.engine.task_graph import COMMUNICATION, COMPUTE, NONE, Graph
from simulator.gradients.buckets import BucketCost
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
        # Of those sent, which pack each; its wire is the operation behind.
        self._sent: defaultdict[int, list[tuple[BucketCost, int]]] = defaultdict(list)

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
                self._sent[number].append((waiting[sent], last))
                sent += 1
        self.graph.extend(stage.rank, lane, duration, waits)
        return [*found, last]

    def exchange(self, rank: int, numbers: Sequence[int]) -> None:
        """Exchange the complete gradients of a rank's stages: send those not sent yet, then receive."""
        if self.sync != "overlapped":
            for number in numbers:
                for bucket in self.stages[number].buckets:
                    self._start(number, bucket)
                    if self.sync == "per_parameter":
                        self._receive(rank, [number])
        if self.sync != "per_parameter":
            self._receive(rank, numbers)

    def _start(self, number: int, bucket: BucketCost) -> None:
        """Pack a bucket and send it."""
        rank = self.stages[number].rank
        pack = self.graph.add(rank, COMPUTE, bucket.pack_ns)
        self.graph.add(rank, COMMUNICATION, bucket.duration_ns, needs=[pack])
        self._sent[number].append((bucket, pack))

    def _receive(self, rank: int, numbers: Sequence[int]) -> None:
        """Unpack each bucket of these stages that was sent, once it has come.

        Buckets that send a second time do so one after the other, once all have come the first time.
        """
        add, again = self.graph.add, dict[int, tuple[int, ...]]()
        sent = [(number, *each) for number in numbers for each in self._sent.pop(number, ())]
        waits = [pack + 1 for _, _, pack in sent]
        wires = waits.copy()
        for place, (_, bucket, _) in enumerate(sent):
            if (later := bucket.later) is not None:
                between = add(rank, COMPUTE, later.between_ns, needs=wires)
                waits[place] = add(rank, COMMUNICATION, later.duration_ns, needs=[between])
                again[place] = (between, waits[place], add(rank, COMPUTE, later.after_ns))
        first = len(self.graph)
        self.graph.extend(rank, [COMPUTE] * len(sent), [bucket.unpack_ns for _, bucket, _ in sent], waits)
        for place, (number, _, pack) in enumerate(sent):
            self.buckets[number].append((pack, pack + 1, first + place, *again.get(place, ())))
