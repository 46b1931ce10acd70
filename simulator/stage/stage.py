"""What each pipeline stage of a plan costs on a cluster, in whole nanoseconds and bytes.

Ranks are numbered by a mesh (see `simulator.hardware.rank_layout`). Where a rank of the pipeline has several stages,
two neighbouring stages may share it; they hand over in memory. Ranks that share layers (tensor, context, expert) take
equal time: one of them stands for all, with the calls that it makes inside of passes (see
`simulator.stage.parallel_passes`).

With sharding each rank updates its own 1/N of the parameters. Stages 1 and 2 scatter each bucket of gradients and
gather its parameters after the update; stage 3 has units in place of buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from distlab.plan import Layer, Link, Plan, Work, Workload, balance
from distlab.plan.partition import even_blocks
from distlab.plan.require import changed
from simulator.gradients.buckets import BucketCost, Tensors, Transfer, cost_buckets, costs_in
from simulator.gradients.compression import MeasuredCodec
from simulator.gradients.fsdp_units import Shards, UnitTimes, scattering, shards_of, time_units, units_of
from simulator.gradients.whole_tensors import whole_update
from simulator.hardware.cost import compute_s, host_seconds_per_byte, message_s
from simulator.hardware.rank_layout import COPIES, EXPERT_COPIES, RankLayout
from simulator.stage.local_layer import LayerTimes, is_shared, local_layers, of_experts, output_bytes, time_layers
from simulator.stage.parallel_passes import INSIDE, CallInPass
from simulator.stage.recomputed import all_kept, chosen, keeps_some, recomputed
from simulator.units import to_ns, widths_of


@dataclass(frozen=True)
class Stage:
    """One stage: its layers, and how long each part of a step takes on one rank.

    Attributes:
        layers: in forward order, with the parameters that a rank has.
        passes_ns: of each layer's F, B, I and W of one micro-batch, calls inside of the pass included. I and W may take
            longer than B, where a call of the backward hides behind work that is W's.
        calls: calls inside of each layer's F, B, I and W, where ranks share layers; else empty.
        rank: rank of the pipeline that has the stage.
        buckets: all-reduces of gradients, in the order in which they start.
        units: what is gathered, computed with and scattered together (sharding's stage 3).
        optimizer_ns: updating the stage's parameters.
        faults: the small all-reduce before the update that tells ranks of faulty gradients (sharding's stages 1, 2).
        send_forward_ns: sending the output of a micro-batch to the next stage (0 for the last, and on the same rank).
        send_backward_ns: sending the gradient of a micro-batch's input to the stage before (0 for the first, and on the
            same rank).
        send_forward_bytes: size of the former.
        send_backward_bytes: size of the latter.
    """

    layers: tuple[Layer, ...]
    passes_ns: tuple[tuple[int, ...], ...]
    calls: tuple[tuple[tuple[CallInPass, ...], ...], ...]
    rank: int
    buckets: tuple[BucketCost, ...]
    units: tuple[UnitTimes, ...]
    optimizer_ns: int
    faults: Transfer | None
    send_forward_ns: int
    send_backward_ns: int
    send_forward_bytes: int
    send_backward_bytes: int

    @property
    def forward_ns(self) -> tuple[int, ...]:
        """Time of each layer's forward."""
        return self.passes_ns[0]

    @property
    def backward_ns(self) -> tuple[int, ...]:
        """Time of each layer's whole backward, I and W together."""
        return self.passes_ns[1]

    @property
    def num_parameters(self) -> int:
        """Elements in the stage's parameters."""
        return sum(layer.num_parameters for layer in self.layers)


def make_stages(
    workload: Workload, layout: RankLayout, rank_of_stage: Sequence[int], *, codec: MeasuredCodec | None = None
) -> tuple[Stage, ...]:
    """Cut the model into stages, of nearly equal time or with as many blocks each, and cost each on the cluster.

    Args:
        workload: the model.
        layout: the plan on its cluster.
        rank_of_stage: rank of the pipeline of each stage.
        codec: measured times of compression.

    Raises:
        ValueError: there are more stages than the model has layers, or blocks that do not divide into them.
    """
    at = _times_at_places(workload, layout)
    kept = _times_at_places(workload, replace(layout, plan=all_kept(layout.plan))) if keeps_some(layout.plan) else at
    own = local_layers(workload.layers, workload.kinds, layout.plan)
    whole = at[0]
    if layout.plan.recompute_method == "every":  # a stage's own first blocks ("block") follow from the cut
        whole = chosen(recomputed(workload, layout.plan, (0, len(whole))), whole, kept[0])
    cuts = cut_layers(workload, layout.plan, [sum(times.durations_ns[:2]) for times in whole], len(rank_of_stage))
    exchanges, known = _Exchanges(workload, layout, codec), dict[object, Stage]()
    links = [None, *(_link(layout, here, there) for here, there in pairwise(rank_of_stage)), None]
    stages = []
    for index, (first, stop) in enumerate(cuts):
        here, layers, kinds = rank_of_stage[index], own[first:stop], workload.kinds[first:stop]
        exchange, beside = exchanges.of(layers, kinds, here), (links[index], links[index + 1])
        times = at[here][first:stop]
        if kept is not at:
            times = chosen(recomputed(workload, layout.plan, (first, stop)), times, kept[here][first:stop])
        alike = (id(exchange), *map(id, times), *map(id, beside), workload.kinds[first - 1] if first else None)
        if alike not in known:
            passes = tuple(zip(*(each.durations_ns for each in times), strict=True))
            calls = tuple(zip(*(each.calls for each in times), strict=True)) if is_shared(layout.plan) else ()
            neighbours = workload.layers[first - 1] if first else None, layers[-1]
            messages = _messages(workload, layout, neighbours, beside, here)
            known[alike] = Stage(layers, passes, calls, here, *exchange, *messages)
        stages.append(changed(known[alike], layers=layers, rank=here))
    return tuple(stages)


def _times_at_places(workload: Workload, layout: RankLayout) -> list[list[LayerTimes]]:
    """Cost the layers at each rank of the pipeline: once for those whose groups all cost alike."""
    known: dict[object, list[LayerTimes]] = {}
    found = []
    for place, placements in enumerate(zip(*(layout.at_places((axis,)) for axis in INSIDE), strict=True)):
        if placements not in known:
            known[placements] = time_layers(workload, layout, place)
        found.append(known[placements])
    return found


def check_enough_layers(workload: Workload, plan: Plan, num_stages: int) -> None:
    """Refuse to cut a model into more stages than it has layers.

    Raises:
        ValueError: there are more.
    """
    if num_stages > len(workload.layers):
        whole = f"{plan.pipeline} (pipeline) x {num_stages // plan.pipeline} (a rank) = {num_stages}"
        count = f"{num_stages} pipeline" if num_stages == plan.pipeline else whole
        raise ValueError(
            f"the plan has {count} stages; workload {workload.name!r} has {len(workload.layers)} "
            f"layers; use at most {len(workload.layers)} stages"
        )


def _link(layout: RankLayout, here: int, there: int) -> Link | None:
    """Return the link between the ranks of two neighbouring stages: None where both are on one rank.

    Where only some of the ranks cross nodes the step waits for those.
    """
    if here == there:
        return None
    if (own := layout.links.get("send")) is not None:
        return own
    return layout.cluster.inter_node if layout.crosses_nodes(here, there) else layout.cluster.intra_node


def cut_layers(workload: Workload, plan: Plan, costs: Sequence[float], num_stages: int) -> tuple[tuple[int, int], ...]:
    """Return the stages, of equal costs or with as many blocks each: first layer and one past the last.

    Raises:
        ValueError: there are more stages than layers, or blocks that do not divide into them.
    """
    check_enough_layers(workload, plan, num_stages)
    if plan.cut == "blocks":
        return even_blocks(*workload.blocks, len(costs), num_stages)
    return _balanced(tuple(costs), num_stages) if num_stages > 1 else ((0, len(costs)),)


_balanced = lru_cache(maxsize=1024)(balance)


def _messages(
    workload: Workload,
    layout: RankLayout,
    layers: tuple[Layer | None, Layer],
    links: tuple[Link | None, Link | None],
    here: int,
) -> tuple[int, int, int, int]:
    """Return the times of a stage's messages to the next stage and to the one before, and their bytes.

    `layers` are the last ones of the stage before and of this one. The former's output has the gradient that goes back.
    """
    times, sizes = [], []
    for layer, link in ((layers[1], links[1]), (layers[0], links[0])):
        if link is None or layer is None:
            sizes.append(0)
            times.append(0)
        else:
            sizes.append(output_bytes(layer, workload, layout.plan) // parts_of_messages(layout))
            times.append(message_ns(sizes[-1], link, layout, here))
    return times[0], times[1], sizes[0], sizes[1]


def message_ns(num_bytes: int, link: Link, layout: RankLayout, pipeline: int) -> int:
    """Return the time of a message to a neighbouring stage; a measured link has all of it.

    Where tensor ranks split messages, each sends its part, and the receivers gather the whole.
    """
    software = layout.cluster.software
    if "send" in layout.links:
        return to_ns(message_s(num_bytes, link))
    sent_ns = to_ns(software.send_s + message_s(num_bytes / software.send_fraction, link))
    if parts_of_messages(layout) > 1:
        sent_ns += layout.slowest(("tensor",), pipeline).exchange_ns("all_gather", num_bytes)
    return sent_ns


def parts_of_messages(layout: RankLayout) -> int:
    """Return into how many parts tensor ranks split a message that all of them have whole."""
    plan = layout.plan
    return plan.tensor if layout.cluster.software.splits_messages and not plan.sequence_parallel else 1


class _Exchange(NamedTuple):
    """What a rank does besides passes and messages: it exchanges gradients and updates. See `Stage` for the fields."""

    buckets: tuple[BucketCost, ...]
    units: tuple[UnitTimes, ...]
    optimizer_ns: int
    faults: Transfer | None


class _Exchanges:
    """Costs what stages exchange: once for stages alike, and equal buckets once for ranks placed alike."""

    def __init__(self, workload: Workload, layout: RankLayout, codec: MeasuredCodec | None) -> None:
        """`codec` has measured times of compression."""
        self.workload, self.layout, self.codec = workload, layout, codec
        self.widths = widths_of(workload, layout.plan)
        self._known: dict[object, _Exchange] = {}
        self._groups: dict[object, dict[str, Any]] = {}
        self._sets: dict[object, Shards] = {}

    def of(self, layers: tuple[Layer, ...], kinds: tuple[int, ...], pipeline: int) -> _Exchange:
        """Return what a stage at a place in the pipeline exchanges: of its layers as a rank has them, and their kinds.

        Stages share one if their layers have the same kinds and their copies are placed on nodes in the same way.
        """
        layout = self.layout
        alike = (kinds, layout.rows(COPIES, pipeline), layout.rows(EXPERT_COPIES, pipeline))
        if alike not in self._known:
            self._known[alike] = self._cost(layers, kinds, pipeline)
        return self._known[alike]

    def _cost(self, layers: tuple[Layer, ...], kinds: tuple[int, ...], pipeline: int) -> _Exchange:
        plan, shards = self.layout.plan, self._shards(COPIES, pipeline)
        if plan.sharding.stage == 3:
            few = shards_of(self.layout, pipeline, axes=EXPERT_COPIES) if plan.expert > 1 else None
            made = units_of(layers, plan.sharding.unit_layers, apart=few is not None)
            units = time_units(made, shards, self.widths, plan, few)
            return _Exchange((), units, self._update_ns(layers, len(units), pipeline), None)
        buckets = self._buckets(layers, kinds, shards, pipeline)
        num_tensors = sum(len(layer.parameter_sizes) for layer in layers)
        is_sharded = plan.sharding.stage > 0
        num_kernels = -(-num_tensors // shards.num_shards) if is_sharded else num_tensors
        update_ns = self._update_ns(layers, num_kernels, pipeline)
        return _Exchange(buckets, (), update_ns, shards.faults(num_tensors) if buckets and is_sharded else None)

    def _shards(self, axes: Sequence[str], pipeline: int) -> Shards:
        """Return the sets of shards of ranks placed alike, which keep what their calls cost."""
        rows = self.layout.rows(axes, pipeline)
        return self._sets.setdefault(rows, shards_of(self.layout, pipeline, axes=axes))

    def _buckets(
        self, layers: tuple[Layer, ...], kinds: tuple[int, ...], shards: Shards, pipeline: int
    ) -> tuple[BucketCost, ...]:
        """Return the buckets of ranks with equal copies; experts have fewer copies, so buckets of their own."""
        plan, layout = self.layout.plan, self.layout
        found: list[BucketCost] = []
        sharing: list[tuple[tuple[str, ...], Sequence[Layer | Tensors], Shards]] = [(COPIES, layers, shards)]
        if plan.expert > 1 and any(layer.expert_parameters for layer in layers):
            few = self._shards(EXPERT_COPIES, pipeline)
            sharing = [
                (COPIES, of_experts(layers, kinds, experts=False), shards),
                (EXPERT_COPIES, of_experts(layers, kinds, experts=True), few),
            ]
        for axes, parts, sets in sharing:
            alike = (axes, layout.rows(axes, pipeline))
            if alike not in self._groups:
                group, sharding = layout.slowest(axes, pipeline), plan.sharding
                change = scattering(sets, self.widths, sharding.offload) if sharding.stage else None
                self._groups[alike] = {"group": group, "costs": costs_in(group, plan.gradient_sync, change)}
            own, whose = self._groups[alike], " of experts" if axes == EXPERT_COPIES else ""
            found += cost_buckets(parts, self.widths.reduce, **own, plan=plan, codec=self.codec, whose=whose)
        return tuple(sorted(found, key=lambda bucket: -bucket.layer)) if len(sharing) > 1 else tuple(found)

    def _update_ns(self, layers: tuple[Layer, ...], num_tensors: int, pipeline: int) -> int:
        """Return the time of updating this rank's part of the layers' parameters, on the device or on its host."""
        workload, plan, cluster = self.workload, self.layout.plan, self.layout.cluster
        experts = sum(layer.expert_parameters for layer in layers) if plan.expert > 1 else 0
        num_parameters = sum(layer.num_parameters for layer in layers) - experts
        own = float(num_parameters + experts)
        if plan.sharding.stage:
            own = num_parameters / plan.sharding.num_shards(plan.copies)
            own += experts / plan.sharding.num_shards(plan.expert_copies) if experts else 0.0
        share = own / workload.num_parameters if workload.num_parameters else 0.0
        tensors = num_tensors / workload.num_tensors if workload.num_tensors else 0.0
        kernels = 1 if cluster.software.flat_buffers else round(workload.optimizer.num_kernels * tensors)
        flops, exchange_ns = workload.optimizer.matmul_flops * share, 0
        if flops and plan.sharding.stage:
            shapes = (shape for layer in layers if layer.input_bytes for shape in layer.shapes)
            shards = plan.sharding.num_shards(plan.copies)
            whole = whole_update(shapes, shards, bytes_each=self.widths.master or self.widths.parameter)
            flops *= whole.flops * shards / max(1.0, whole.all_flops)
            if plan.sharding.stage == 3:  # others reduce and gather whole tensors at their owners anyway
                group = self.layout.slowest(COPIES, pipeline)
                exchange_ns = sum(group.exchange_ns("all_to_all", one) for one in whole.buffers_bytes)
        work = Work(flops, workload.optimizer.memory_bytes * share, kernels)
        if plan.sharding.offload != "none":
            return to_ns(work.memory_bytes * host_seconds_per_byte(cluster, plan.world_size))
        return max(exchange_ns, to_ns(compute_s(work, cluster.device)))
