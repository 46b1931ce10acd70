"""What ranks that share a layer send one another inside its passes, and how much of it hides behind computation.

A pass of a layer is a sequence of parts. Each part is computation, a call, or a call that overlaps computation:

    tensor     all-reduce of a region's output in forward, of its input's gradient in backward. The latter overlaps the
               weights' gradient of the product that the region began with; with sequence parallelism all-gather and
               reduce-scatter in their places
    context    a ring: keys and values travel to the next rank during attention to those at hand, and in backward their
               gradients follow one step behind; or all-to-alls before and after attention, which nothing hides
    expert     all-to-alls that bring tokens to experts and back, which nothing hides either

So a pass takes a fixed time, whatever the pipeline does around it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from distlab.plan import Attention, Experts, Layer, Plan, Work
from simulator.stage.pass_timeline import NO_WORK, CallCosts, CallSpec, PassTimeline
from simulator.stage.recomputed import run_again

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
        timeline.work(work.times(1 / shares.inside))
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
        timeline.work((work.without(region.beside) if hides else work).times(1 / shares.inside))
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
    recompute = timeline.costs.plan.recompute
    if again := run_again(layer, recompute, stops_early=timeline.costs.stops_early):
        forward_of(again, timeline)
    elif recompute == "selective":
        timeline.work(layer.score_forward.times(1 / (shares.inside if layer.regions else 1)))


def _outside(layer: Layer, name: str) -> Work:
    whole: Work = getattr(layer, name)
    for part in (*layer.regions, *([layer.experts] if layer.experts else [])):
        whole = whole.without(getattr(part, name))
    return whole


def attend(attention: Attention, timeline: PassTimeline, shares: Shares, *, backward: bool = False) -> None:
    """Add scores and mixing, or their gradients, with what context-parallel ranks send for them.

    Ring, over n ranks: in each of n steps every rank attends to the keys of one rank, while these travel on to the next
    (in the last step they are back). In backward they go round once more. What a step adds to the gradients of the keys
    at hand leaves after it and travels during the next one. After the last step it returns to its owner, which nothing
    hides. All-to-all: positions are traded for heads, and back.

    Cost: ring 2 (n-1)/n B S H/g elements sent, in backward as many and as many gradients; all-to-all
        (n-1)/n (2 + 2/g) B S H/n in either.
    """
    n, width, work = shares.positions, timeline.costs.width, attention.backward if backward else attention.forward
    if n == 1 or timeline.costs.plan.context_kind == "all_to_all":
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
        timeline.overlap(_ring_step(work, shares), hops)
    if backward:
        timeline.overlap(NO_WORK, [sums])


def _ring_step(work: Work, shares: Shares) -> Work:
    """Return one step's work: an even part, since the zig-zag gives each step as many unmasked pairs.

    The first step attends to the rank's own positions, whose square a causal mask halves; each later one to half the
    keys, or with half the queries.
    """
    return work.times(1 / (shares.inside * shares.positions))


def mix(experts: Experts, timeline: PassTimeline, shares: Shares, names: list[str] | None = None) -> None:
    """Add a pass through experts: its two all-to-alls, of rows that leave and rows that come back.

    Forward, where no names are given, first sums the balance loss and tells how many rows come; backward sums the
    loss' gradient. Where the experts do not divide by the ranks, the ranks with the most count.

    Cost: (e-1)/e of the rows' bytes sent in each all-to-all; 8 (E + 4 e) bytes of counts; 8 (2 E + 1) of the loss.
        Where the cluster dispatches once, a token crosses to the nodes of its experts, not to each of its experts.
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
    crossing = _crossing(experts, timeline.costs)
    timeline.call("expert", "rows to experts" if forward else "gradients to experts", "all_to_all", rows, crossing)
    for name in names or ["forward"]:
        work: Work = getattr(experts, name)
        kernels = work.num_kernels - experts.kernels_each * (experts.num_experts - most)
        timeline.work(replace(work, num_kernels=kernels).times(load))
    timeline.call("expert", "rows back" if forward else "gradients back", "all_to_all", rows, crossing)
    if not forward:
        timeline.call("expert", "gradient of the balance loss", "all_reduce", loss)


def _crossing(experts: Experts, costs: CallCosts) -> float:
    """Return the part of the rows for other nodes that crosses to them: all, or one for each node of a token's experts.

    Source: deepseek-ai/DeepEP, 2025: a token crosses to the rank of its own place in a node, which hands it on.
    """
    group = costs.groups["expert"][0]
    if not group.cluster.software.dispatches_once or group.num_nodes == 1:
        return 1.0
    return min(1.0, experts.nodes_of_a_token(group.num_nodes) / experts.top_k)
