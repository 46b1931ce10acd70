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
from functools import cached_property
from itertools import pairwise

from distlab.plan import Layer, Link, Plan, Workload, balance
from distlab.plan.partition import even_blocks
from distlab.plan.require import changed
from simulator.gradients.buckets import BucketCost, Transfer
from simulator.gradients.compression import MeasuredCodec
from simulator.gradients.fsdp_units import UnitTimes
from simulator.hardware.rank_layout import RankLayout
from simulator.stage.local_layer import LayerTimes, is_shared, local_layers, output_bytes, time_layers
from simulator.stage.messages import message_ns, parts_of_messages
from simulator.stage.pass_timeline import INSIDE, CallInPass
from simulator.stage.recomputed import all_kept, chosen, keeps_some, recomputed
from simulator.stage.upkeep import Upkeep, Upkeeps


@dataclass(frozen=True)
class Stage:
    """One stage: its layers, and how long each part of a step takes on one rank.

    Attributes:
        layers: in forward order, with the parameters that a rank has.
        forward_ns: of each layer, one micro-batch, calls inside of the pass included.
        backward_ns: of each layer, one micro-batch (I and W together).
        input_gradient_ns: of each layer, one micro-batch: I alone, with what is computed again before it.
        weight_gradient_ns: of each layer, one micro-batch: W alone; what I leaves of B where it is not given.
        calls: calls inside of each layer's F, B, I and W, where ranks share layers; else empty.
        rank: rank of the pipeline that has the stage.
        buckets: all-reduces of gradients, in the order in which they start.
        optimizer_ns: updating the stage's parameters.
        send_forward_ns: sending the output of a micro-batch to the next stage (0 for the last, and on the same rank).
        send_backward_ns: sending the gradient of a micro-batch's input to the stage before (0 for the first, and on the
            same rank).
        send_forward_bytes: size of the former.
        send_backward_bytes: size of the latter.
        units: what is gathered, computed with and scattered together (sharding's stage 3).
        faults: the small all-reduce before the update that tells ranks of faulty gradients (sharding's stages 1, 2).
    """

    layers: tuple[Layer, ...]
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    buckets: tuple[BucketCost, ...]
    optimizer_ns: int
    send_forward_ns: int
    send_backward_ns: int
    send_forward_bytes: int
    send_backward_bytes: int
    units: tuple[UnitTimes, ...] = ()
    faults: Transfer | None = None
    input_gradient_ns: tuple[int, ...] = ()
    rank: int = 0
    weight_gradient_ns: tuple[int, ...] = ()
    calls: tuple[tuple[tuple[CallInPass, ...], ...], ...] = ()

    @cached_property
    def passes_ns(self) -> tuple[tuple[int, ...], ...]:
        """Time of each layer in an F, B, I and W.

        I and W may take longer than B, where a call of the backward hides behind work that is W's.
        """
        left = (back - mine for back, mine in zip(self.backward_ns, self.input_gradient_ns, strict=True))
        return self.forward_ns, self.backward_ns, self.input_gradient_ns, self.weight_gradient_ns or tuple(left)

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
    check_enough_layers(workload, layout.plan, len(rank_of_stage))
    at = _times_at_places(workload, layout)
    kept = _times_at_places(workload, replace(layout, plan=all_kept(layout.plan))) if keeps_some(layout.plan) else at
    own = local_layers(workload.layers, workload.kinds, layout.plan)
    whole = at[0]
    if layout.plan.recompute_method == "every":  # a stage's own first blocks ("block") follow from the cut
        whole = chosen(recomputed(workload, layout.plan, (0, len(whole))), whole, kept[0])
    cuts = _cut(workload, layout.plan, [sum(times.durations_ns[:2]) for times in whole], len(rank_of_stage))
    upkeeps, known = Upkeeps(workload, layout, codec), dict[object, Stage]()
    links = [None, *(_link(layout, here, there) for here, there in pairwise(rank_of_stage)), None]
    stages = []
    for index, (first, stop) in enumerate(cuts):
        here, layers, kinds = rank_of_stage[index], own[first:stop], workload.kinds[first:stop]
        upkeep, beside = upkeeps.of(layers, kinds, here), (links[index], links[index + 1])
        times = at[here][first:stop]
        if kept is not at:
            times = chosen(recomputed(workload, layout.plan, (first, stop)), times, kept[here][first:stop])
        alike = (id(upkeep), *map(id, times), *map(id, beside), workload.kinds[first - 1] if first else None)
        if alike not in known:
            before = workload.layers[first - 1] if first else None
            known[alike] = _stage(workload, layout, (layers, before), beside, here, times=times, upkeep=upkeep)
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


def _cut(workload: Workload, plan: Plan, costs: list[int], num_stages: int) -> tuple[tuple[int, int], ...]:
    if plan.cut == "blocks":
        return even_blocks(*workload.blocks, len(costs), num_stages)
    if num_stages == 1:
        return ((0, len(costs)),)
    return balance(costs, num_stages)


def _stage(
    workload: Workload,
    layout: RankLayout,
    own: tuple[tuple[Layer, ...], Layer | None],
    beside: tuple[Link | None, Link | None],
    here: int,
    *,
    times: Sequence[LayerTimes],
    upkeep: Upkeep,
) -> Stage:
    """Cost a stage, behind a layer of the stage before it: `beside` are the links to its neighbours on other ranks."""
    (layers, last_before), (before, behind), plan = own, beside, layout.plan
    parts = parts_of_messages(layout)
    forward_bytes = 0 if behind is None else output_bytes(layers[-1], workload, plan) // parts
    backward_bytes = 0 if before is None or last_before is None else output_bytes(last_before, workload, plan) // parts
    forward, backward, inputs, weights = zip(*(each.durations_ns for each in times), strict=True)
    calls = tuple(zip(*(each.calls for each in times), strict=True)) if is_shared(plan) else ()
    return Stage(
        layers=layers,
        forward_ns=forward,
        backward_ns=backward,
        buckets=upkeep.buckets,
        optimizer_ns=upkeep.optimizer_ns,
        send_forward_ns=0 if behind is None else message_ns(forward_bytes, behind, layout, here),
        send_backward_ns=0 if before is None else message_ns(backward_bytes, before, layout, here),
        send_forward_bytes=forward_bytes,
        send_backward_bytes=backward_bytes,
        units=upkeep.units,
        faults=upkeep.faults,
        input_gradient_ns=inputs,
        rank=here,
        weight_gradient_ns=weights if calls else (),
        calls=calls,
    )
