"""The timeline of one layer's pass: computation and calls, and how much of the calls hides behind computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from distlab.plan import Contention, Device, Plan, Work
from simulator.hardware.cost import busy_s
from simulator.hardware.rank_layout import Group
from simulator.units import to_ns

INSIDE = ("tensor", "context", "expert")  # axes whose ranks exchange inside of passes
NO_WORK = Work()


class CallInPass(NamedTuple):
    """One call inside a layer's pass.

    Attributes:
        axis: whose ranks exchange, and the lane in a trace.
        name: what a reader sees, the layer's name left out.
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or send.
        start_ns: counted from the start of the layer's pass.
        end_ns: counted from the start of the layer's pass.
        num_bytes: of the whole that is summed, scattered or gathered; given to an all-to-all; or sent.
        sent_bytes: what a rank's link carries for it, one way, by ring algorithms.
        exposed_ns: the part of its time in which the rank computes nothing.
    """

    axis: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    num_bytes: int
    sent_bytes: float
    exposed_ns: int


class CallSpec(NamedTuple):
    """A call to be made: the axis, what it is about, its kind, and bytes as `CallCosts.cost` counts them.

    Of an all-to-all only the part `crossing` of what is meant for other nodes leaves for them.
    """

    axis: str
    name: str
    kind: str
    num_bytes: float
    crossing: float = 1.0


@dataclass(frozen=True)
class CallCosts:
    """What calls and work cost the ranks of a stage.

    Attributes:
        device: what they compute on.
        contention: how much work and calls slow each other down.
        groups: of each axis, the groups that sit differently in their nodes: the slowest counts.
        plan: the degrees.
        gradient_bytes: of an element of a gradient.
        width: how much wider than the workload's the activations are.
        stops_early: a layer that is recomputed stops before its last product.
    """

    device: Device
    contention: Contention
    groups: Mapping[str, tuple[Group, ...]]
    plan: Plan
    gradient_bytes: int
    width: float = 1.0
    stops_early: bool = False

    def cost(self, axis: str, kind: str, num_bytes: float, crossing: float = 1.0) -> tuple[int, float]:
        """Return nanoseconds and sent bytes of a call on num_bytes: of the whole for a gather, a rank's for others."""
        key, groups = (axis, kind, num_bytes, crossing), self.groups[axis]
        if key in self._costs:  # a layer's passes repeat their calls
            return self._costs[key]
        if kind == "send":
            found = max([group.hop_ns(num_bytes) for group in groups]), num_bytes
        else:
            each = num_bytes / groups[0].num_ranks if kind == "all_gather" else num_bytes
            time_ns = max([group.exchange_ns(kind, each, crossing) for group in groups])
            if axis == "tensor":
                time_ns = round(time_ns * (1 - groups[0].cluster.software.tensor_overlap))
            found = time_ns, groups[0].sent_bytes(kind, each, crossing)
        self._costs[key] = found
        return found

    @cached_property
    def _costs(self) -> dict[tuple[str, str, float, float], tuple[int, float]]:
        return {}

    def shared(self, axis: str) -> bool:
        """Return whether there is a different rank along an axis."""
        return self.groups[axis][0].num_ranks > 1

    def work_ns(self, work: Work) -> int:
        """Return the nanoseconds of work on a device whose host runs ahead."""
        return to_ns(busy_s(work, self.device))


class PassTimeline:
    """The parts of a pass, one after the other, as they are added.

    The host launches kernels and calls one after the other, and waits for none: the device works them off. So a pass
    takes as long as the device needs, or as long as all launches.
    """

    def __init__(self, costs: CallCosts) -> None:
        self.costs = costs
        self.now = 0
        self.launches = 0
        self.calls: list[CallInPass] = []

    @property
    def total_ns(self) -> int:
        """Time of the pass so far: of the device, or of the host where that takes longer."""
        return max(self.now, to_ns(self.launches * self.costs.device.launch_s))

    def work(self, work: Work) -> None:
        """Add work alone."""
        self.now += self.costs.work_ns(work)
        self.launches += work.num_kernels

    def call(self, axis: str, name: str, kind: str, num_bytes: float, crossing: float = 1.0) -> None:
        """Add a call that overlaps nothing."""
        if num_bytes > 0 and self.costs.shared(axis):
            self.overlap(NO_WORK, [CallSpec(axis, name, kind, num_bytes, crossing)])

    def overlap(self, work: Work, calls: list[CallSpec]) -> None:
        """Add work and the calls that overlap it, one after the other on the wire; what follows waits for all."""
        sent = [call for call in calls if call.num_bytes > 0 and self.costs.shared(call.axis)]
        if not sent:
            self.work(work)
            return
        self.launches += work.num_kernels + len(sent)
        found = [self.costs.cost(call.axis, call.kind, call.num_bytes, call.crossing) for call in sent]
        wire = sum(time for time, _ in found)
        worked, travelled = side_by_side(self.costs.work_ns(work), wire, self.costs.contention)
        so_far, begin = 0, self.now
        for call, (time, size) in zip(sent, found, strict=True):
            so_far += time
            end = self.now + travelled * so_far // max(wire, 1)
            exposed = max(0, end - max(begin, self.now + worked))
            name = f"{call.kind} {call.name}"
            self.calls.append(CallInPass(call.axis, name, call.kind, begin, end, round(call.num_bytes), size, exposed))
            begin = end
        self.now += max(worked, travelled)


def side_by_side(work_ns: int, wire_ns: int, contention: Contention) -> tuple[int, int]:
    """Return when work and a call that start together end, where each slows the other down while both run.

    Error: exact for constant rates, in whole nanoseconds.
    """
    worked, travelled = work_ns * contention.compute_slowdown, wire_ns * contention.communication_slowdown
    if worked <= travelled:  # the rest of the call travels undisturbed
        return round(worked), round(worked + wire_ns - worked / contention.communication_slowdown)
    return round(travelled + work_ns - travelled / contention.compute_slowdown), round(travelled)
