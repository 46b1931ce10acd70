"""What ranks that share a layer send one another inside its passes, and how much of it hides behind computation.

A pass of a layer is a sequence of parts. Each part is computation, a call, or a call that overlaps computation:

    tensor     all-reduce of a region's output in forward, of its input's gradient in backward. The latter overlaps the
               weights' gradient of the product that the region began with; with sequence parallelism all-gather and
               reduce-scatter in their places
    context    a ring: keys and values travel to the next rank during attention to those at hand, and in backward their
               gradients follow one step behind; or all-to-alls before and after attention, or an all-gather of keys
               and values before it and, in backward, a reduce-scatter of their gradients after it: nothing hides these
    expert     all-to-alls that bring tokens to experts and back, which nothing hides either

So a pass takes a fixed time, whatever the pipeline does around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from distlab.plan import Attention, Contention, Device, Experts, Layer, Plan, Product, Work
from simulator.hardware.cost import Sent, busy_s
from simulator.hardware.rank_layout import Group
from simulator.stage.recomputed import run_again
from simulator.units import to_ns

INSIDE = ("tensor", "context", "expert")  # axes whose ranks exchange inside of passes
NO_WORK = Work()
CASTS = {"forward": 2, "input_gradient": 1, "weight_gradient": 0}  # to 8 bits, of a product


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

    `sent` tells of rows on their way to experts or back, where each goes to a rank and a node once.
    """

    axis: str
    name: str
    kind: str
    num_bytes: float
    sent: Sent | None = None


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

    def cost(self, axis: str, kind: str, num_bytes: float, sent: Sent | None = None) -> tuple[int, float]:
        """Return nanoseconds and sent bytes of a call on num_bytes: of the whole for a gather, a rank's for others."""
        key, groups = (axis, kind, num_bytes, sent), self.groups[axis]
        if key in self._costs:  # a layer's passes repeat their calls
            return self._costs[key]
        if kind == "send":
            found = max([group.hop_ns(num_bytes) for group in groups]), num_bytes
        else:
            each = num_bytes / groups[0].num_ranks if kind == "all_gather" else num_bytes
            time_ns = max([group.exchange_ns(kind, each, sent) for group in groups])
            found = round(time_ns * (1 - self._hidden(axis, groups[0]))), groups[0].sent_bytes(kind, each, sent)
        self._costs[key] = found
        return found

    def _hidden(self, axis: str, group: Group) -> float:
        """Return the part of a call's time that software hides behind products.

        Megatron-Core hides expert ranks' calls by interleaved schedules that do not recompute all, and its recipes do
        so over nodes alone: inside of them the calls' kernels would cost products more than is hidden.

        Source: NVIDIA-NeMo/Megatron-Bridge, comm_overlap.py and scripts/performance/configs, 2025 and 2026.
        """
        software, plan = group.cluster.software, self.plan
        if axis == "tensor":
            return software.tensor_overlap
        alternates = plan.schedule == "interleaved" and plan.recompute != "full" and not group.is_in_one_node
        return software.expert_overlap if axis == "expert" and alternates else 0.0

    @cached_property
    def _costs(self) -> dict[tuple[str, str, float, Sent | None], tuple[int, float]]:
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

    def work(self, work: Work, more_launches: int = 0) -> None:
        """Add work alone, with more launches than it has kernels, or fewer."""
        self.now += self.costs.work_ns(work)
        self.launches += work.num_kernels + more_launches

    def call(self, axis: str, name: str, kind: str, num_bytes: float, sent: Sent | None = None) -> None:
        """Add a call that overlaps nothing."""
        if num_bytes > 0 and self.costs.shared(axis):
            self.overlap(NO_WORK, [CallSpec(axis, name, kind, num_bytes, sent)])

    def overlap(self, work: Work, calls: list[CallSpec]) -> None:
        """Add work and the calls that overlap it, one after the other on the wire; what follows waits for all."""
        sent = [call for call in calls if call.num_bytes > 0 and self.costs.shared(call.axis)]
        if not sent:
            self.work(work)
            return
        self.launches += work.num_kernels + len(sent)
        found = [self.costs.cost(call.axis, call.kind, call.num_bytes, call.sent) for call in sent]
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


NUMBER_BYTES = 8  # of counts of rows, and of what a balance loss adds up


class Shares(NamedTuple):
    """Into how many parts the ranks cut a layer: positions outside of regions, and all that is inside of them."""

    outside: int
    inside: int
    positions: int

    @classmethod
    def of(cls, layer: Layer, plan: Plan) -> Shares:
        """Return the shares of a layer under a plan."""
        positions = plan.context if layer.splits_positions else 1
        along = plan.tensor if plan.sequence_parallel and layer.splits_positions else 1
        return cls(positions * along, positions * plan.tensor, positions)


def forward_of(layer: Layer, timeline: PassTimeline) -> None:
    """Add a layer's forward: what is outside of regions, each region, then experts."""
    plan, width, shares = timeline.costs.plan, timeline.costs.width, Shares.of(layer, timeline.costs.plan)
    timeline.work(_outside(layer, "forward").times(1 / shares.outside))
    for region in layer.regions:
        if plan.sequence_parallel:
            timeline.call("tensor", region.name, "all_gather", region.input_bytes * width / shares.positions)
        work = region.forward.without(region.attention.forward) if region.attention else region.forward
        timeline.work(work.times(1 / shares.inside), num_casts(region.products, plan, "forward"))
        if region.attention:
            attend(region.attention, timeline, shares)
        for size in region.sums_bytes:
            timeline.call("tensor", region.name, "all_reduce", size / shares.positions)
        end = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
        timeline.call("tensor", region.name, end, region.output_bytes * width / shares.positions)
    if layer.experts:
        mix(layer.experts, timeline, shares)


def backward_of(layer: Layer, timeline: PassTimeline, *, inputs: bool = True, weights: bool = True) -> None:
    """Add a layer's backward: both gradients, or the input's or the weights' alone; what came last comes first.

    In a backward of both, a region's last product of weights runs while its input's gradient travels. The weights'
    gradient alone sends nothing but sums of small gradients: what it needs was there when the input's was made.
    """
    plan, width, shares = timeline.costs.plan, timeline.costs.width, Shares.of(layer, timeline.costs.plan)
    names = ["input_gradient"] * inputs + ["weight_gradient"] * weights
    if inputs:
        _run_again(layer, timeline, shares)
    if layer.experts:
        mix(layer.experts, timeline, shares, names)
    for region in reversed(layer.regions):
        if inputs and plan.sequence_parallel:
            timeline.call("tensor", region.name, "all_gather", region.output_bytes * width / shares.positions)
        works: list[Work] = [getattr(region, name) for name in names]
        work = sum(works[1:], works[0])
        hides = inputs and weights
        if inputs and region.attention:
            work = work.without(region.attention.backward)
            attend(region.attention, timeline, shares, backward=True)
        casts = num_casts(region.products, plan, names[0])
        timeline.work((work.without(region.beside) if hides else work).times(1 / shares.inside), casts)
        kind, size = ("reduce_scatter" if plan.sequence_parallel else "all_reduce"), region.input_bytes * inputs
        call = CallSpec("tensor", region.name, kind, size * width / shares.positions)
        timeline.overlap(region.beside.times(1 / shares.inside) if hides else NO_WORK, [call])
    first, *rest = (_outside(layer, name) for name in names)
    timeline.work(sum(rest, first).times(1 / shares.outside))
    if weights and plan.sequence_parallel:
        for kind, elements in layer.sequence_calls:
            timeline.call("tensor", "gradients", kind, elements * timeline.costs.gradient_bytes)


def _run_again(layer: Layer, timeline: PassTimeline, shares: Shares) -> None:
    """Add what recomputing runs before a backward: a forward or a part of it, with calls, or attention's inner part."""
    plan = timeline.costs.plan
    if again := run_again(layer, plan, stops_early=timeline.costs.stops_early):
        forward_of(again, timeline)
    elif plan.recompute == "selective":
        timeline.work(layer.score_forward.times(1 / (shares.inside if layer.regions else 1)))


def _outside(layer: Layer, name: str) -> Work:
    whole: Work = getattr(layer, name)
    for part in (*layer.regions, *([layer.experts] if layer.experts else [])):
        whole = whole.without(getattr(part, name))
    return whole


def attend(attention: Attention, timeline: PassTimeline, shares: Shares, *, backward: bool = False) -> None:
    """Add scores and mixing, or their gradients, with what context-parallel ranks send for them.

    Ring, over n ranks: in each of n steps every rank attends to the keys of one rank, while these travel on to the next
    (in the last step they are back). Steps are equal, since the zig-zag gives each as many unmasked pairs. In backward
    keys go round once more. What a step adds to the gradients of the keys at hand leaves after it and travels during
    the next one. After the last step it returns to its owner, which nothing hides. All-to-all: positions are traded for
    heads, and back.

    Cost: ring and all-gather 2 (n-1)/n B S H/g elements sent, in backward as many and as many gradients; all-to-all
        (n-1)/n (2 + 2/g) B S H/n in either.
    Source: all-gather: Llama Team 2024 (2407.21783), section 3.3.2; NVIDIA/TransformerEngine, context_parallel.py, 2025
    """
    n, width, work = shares.positions, timeline.costs.width, attention.backward if backward else attention.forward
    kind = timeline.costs.plan.context_kind
    if n > 1 and timeline.costs.groups["context"][0].cluster.software.repeats_heads:
        copies = attention.num_heads // attention.num_key_value_heads
        forth, back = copies * attention.key_value_bytes, copies * attention.key_value_gradient_bytes
        attention = replace(attention, key_value_bytes=forth, key_value_gradient_bytes=back)
    if n > 1 and kind == "all_gather":
        whole = attention.key_value_bytes * width * n / shares.inside
        timeline.call("context", "keys and values", "all_gather", whole)
        timeline.work(work.times(1 / shares.inside))
        timeline.call("context", "gradients of keys and values", "reduce_scatter", whole * backward)
        return
    if n == 1 or kind == "all_to_all":
        both = (attention.query_bytes + attention.key_value_bytes) * width / shares.inside
        mixed = attention.query_bytes * width / shares.inside
        words = ("gradients of ", "gradient of ") if backward else ("", "")
        calls = [(f"{words[0]}queries, keys and values", both), (f"{words[1]}mixed values", mixed)]
        for place, (name, size) in enumerate(reversed(calls) if backward else calls):
            if place:
                timeline.work(work.times(1 / shares.inside))
            timeline.call("context", name, "all_to_all", size if n > 1 else 0)
        return
    keys = CallSpec("context", "keys and values", "send", attention.key_value_bytes * width / shares.inside)
    size = attention.key_value_gradient_bytes / shares.inside
    sums = CallSpec("context", "gradients of keys and values", "send", size)
    for step in range(n):
        hops = [sums] * (backward and step > 1) + [keys] * (step < n - 1)
        timeline.overlap(work.times(1 / (shares.inside * n)), hops)
    if backward:
        timeline.overlap(NO_WORK, [sums])


def mix(experts: Experts, timeline: PassTimeline, shares: Shares, names: list[str] | None = None) -> None:
    """Add a pass through experts: its two all-to-alls, of rows that leave and rows that come back.

    Forward, where no names are given, first sums the balance loss and tells how many rows come; backward sums the
    loss' gradient. Where the experts do not divide by the ranks, the ranks with the most count.

    Cost: (e-1)/e of the rows' bytes sent in each all-to-all; 8 (E + 4 e) bytes of counts; 8 (2 E + 1) of the loss.
        Where the cluster dispatches once, a token goes to the ranks and nodes of its experts, not to each expert.
    """
    ranks, forward = timeline.costs.plan.expert, names is None
    sends = forward or "input_gradient" in names  # type: ignore[operator]
    most = experts.most_on_a_rank(ranks)
    rows = experts.row_bytes * timeline.costs.width / shares.outside if sends else 0.0
    load = most * ranks / experts.num_experts / shares.outside
    loss = NUMBER_BYTES * (2 * experts.num_experts + 1) * sends
    if forward:
        timeline.call("expert", "balance loss", "all_reduce", loss)
        timeline.call("expert", "counts", "all_to_all", NUMBER_BYTES * (experts.num_experts + 4 * ranks))
    sent = _sent(experts, timeline.costs)
    timeline.call("expert", "rows to experts" if forward else "gradients to experts", "all_to_all", rows, sent)
    for name in names or ["forward"]:
        work: Work = getattr(experts, name)
        kernels = work.num_kernels - _kernels_each(experts, name) * (experts.num_experts - most)
        launches = more_launches(experts, timeline.costs, most, name)
        timeline.work(replace(work, num_kernels=kernels).times(load), launches)
    timeline.call("expert", "rows back" if forward else "gradients back", "all_to_all", rows, sent)
    if not forward:
        timeline.call("expert", "gradient of the balance loss", "all_reduce", loss)


def num_casts(products: Sequence[Product], plan: Plan, name: str) -> int:
    """Return the launches of a pass that cast to 8 bits: inputs and parameters of products, then outputs' gradients."""
    return CASTS[name] * len(products) if plan.float8 != "none" else 0


def more_launches(experts: Experts | None, costs: CallCosts, most: int, name: str) -> int:
    """Return how many more launches than kernels a pass through `most` experts has, its casts included.

    Products that all experts launch together, and routing, are `Software.expert_launches` in number.
    """
    launches = costs.groups["expert"][0].cluster.software.expert_launches
    if experts is None or not launches:
        return 0
    return launches - _kernels_each(experts, name) * most + num_casts(experts.products, costs.plan, name)


def _kernels_each(experts: Experts, name: str) -> int:
    """Return the kernels of one expert in a pass: a frozen one has fewer for gradients of weights."""
    work: Work = getattr(experts, name)
    return min(experts.kernels_each, work.num_kernels // experts.num_experts)


def _sent(experts: Experts, costs: CallCosts) -> Sent | None:
    """Return the parts of a token's rows that are sent to ranks and to nodes; None: each row goes to its expert."""
    group, top_k = costs.groups["expert"][0], experts.top_k
    if not group.cluster.software.dispatches_once or not group.ranks_per_node:
        return None
    return Sent(*(min(1.0, experts.nodes_of_a_token(n) / top_k) for n in (group.num_ranks, group.num_nodes)))
