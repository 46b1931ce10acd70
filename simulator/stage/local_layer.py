"""A model as one rank sees it: the time of each layer's passes, with its calls, and the parameters it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distlab.plan import Layer, Plan, Work, Workload
from distlab.plan.require import changed
from simulator.gradients.buckets import Tensors
from simulator.hardware.cost import compute_s
from simulator.hardware.rank_layout import RankLayout
from simulator.stage.parallel_passes import (
    CASTS,
    INSIDE,
    CallCosts,
    CallInPass,
    PassTimeline,
    Shares,
    backward_of,
    forward_of,
    more_launches,
    num_casts,
)
from simulator.stage.products import with_shapes
from simulator.stage.recomputed import run_again
from simulator.units import Widths, to_ns, widths_of


class LayerTimes(NamedTuple):
    """The passes F, B, I and W of one layer: nanoseconds, and what is sent inside of each."""

    durations_ns: tuple[int, int, int, int]
    calls: tuple[tuple[CallInPass, ...], ...] = ((), (), (), ())


def is_shared(plan: Plan) -> bool:
    """Return whether ranks share layers, so that passes hold calls."""
    return plan.tensor * plan.context * plan.expert > 1


def divides(workload: Workload, plan: Plan) -> bool:
    """Return whether the ranks can divide heads and positions; see `check_divides`."""
    try:
        check_divides(workload, plan)
    except ValueError:
        return False
    return True


def check_divides(workload: Workload, plan: Plan) -> None:
    """Refuse heads and positions that the ranks cannot divide.

    Raises:
        ValueError: tensor ranks do not divide the heads, or context ranks the positions (a zig-zag cuts them in twice
            as many parts); or all-to-alls have fewer heads than ranks.
    """
    if not is_shared(plan):
        return
    tensor, context = plan.tensor, plan.context
    regions = {id(region): region for layer in workload.layers for region in layer.regions}
    for attention in (region.attention for region in regions.values() if region.attention is not None):
        for name, heads in (("heads", attention.num_heads), ("key-value heads", attention.num_key_value_heads)):
            parts = tensor * (context if plan.context_kind == "all_to_all" else 1)
            axes = f"{tensor} (tensor)" + (f" x {context} (context, all-to-all)" if parts > tensor else "")
            if heads % parts:
                raise ValueError(f"{axes} ranks cannot divide {heads} {name} evenly; use a divisor of {heads}")
        parts = 2 * context if context > 1 else 1
        if attention.num_positions % parts:
            raise ValueError(
                f"{context} (context) ranks need sequences of a multiple of {parts} positions; got "
                f"{attention.num_positions}: change the sequence or the degree"
            )
        if plan.sequence_parallel and attention.num_positions // context % tensor:
            raise ValueError(
                f"{tensor} (tensor) ranks cannot divide {attention.num_positions // context} positions evenly with "
                "sequence parallelism; use a divisor, or leave sequence_parallel out"
            )


def time_layers(workload: Workload, layout: RankLayout, pipeline: int = 0, *, splits: bool = True) -> list[LayerTimes]:
    """Cost the passes of every layer on the ranks at a place in the pipeline; without `splits`, F and B alone.

    Layers that differ in their name alone are costed once.
    """
    plan, widths = layout.plan, widths_of(workload, layout.plan)
    is_grouped = plan.recompute_method == "uniform" and plan.recompute_layers > 1  # only a group's last may stop early
    stops_early = layout.cluster.software.stops_early and not is_grouped
    cluster, known = layout.cluster, dict[int, LayerTimes]()
    groups = {axis: layout.groups((axis,), pipeline) for axis in INSIDE}
    own = (plan, widths.reduce, widths.activations, stops_early)
    launch_s = max(cluster.device.launch_s, cluster.software.pass_launch_s)
    costs = CallCosts(changed(cluster.device, launch_s=launch_s), cluster.contention, groups, *own)
    sums = not cluster.software.fused_sums and not (plan.sharding.stage == 3 and cluster.software.scatters_each)
    for kind, layer in zip(workload.kinds, workload.layers, strict=True):
        if kind not in known:
            local = with_shapes(layer, plan, cluster)
            local = _with_sums(local, plan, widths) if sums else local
            known[kind] = _shared(local, costs, splits=splits) if is_shared(plan) else _whole(local, costs)
    return [known[kind] for kind in workload.kinds]


def _with_sums(layer: Layer, plan: Plan, widths: Widths) -> Layer:
    """Return the layer with the work of adding its gradients to wider ones, as every micro-batch does.

    A kernel per tensor reads the gradient and the sum, and writes the sum. Gradients as wide as the parameters need no
    such kernel in the first micro-batch; adding up the others is left out.
    """
    if widths.gradient <= widths.parameter or not layer.parameter_sizes:
        return layer
    experts = layer.expert_parameters
    own = layer.num_parameters - layer.tensor_parameters - experts + layer.tensor_parameters / plan.tensor
    own += experts * layer.experts.most_on_a_rank(plan.expert) / layer.experts.num_experts if layer.experts else 0
    whole = own * Shares.of(layer, plan).outside if is_shared(plan) else own  # not cut by positions
    sums = Work(memory_bytes=whole * (widths.parameter + 2 * widths.gradient), num_kernels=len(layer.parameter_sizes))
    return changed(layer, weight_gradient=layer.weight_gradient + sums)


def _whole(layer: Layer, costs: CallCosts) -> LayerTimes:
    device, recompute = costs.device, costs.plan.recompute
    more = {name: _more(layer, costs, name) for name in CASTS}
    forward = to_ns(compute_s(layer.forward, device, more["forward"]))
    runs_again = run_again(layer, costs.plan, stops_early=costs.stops_early)
    again = layer.score_forward if recompute == "selective" else Work()
    again = runs_again.forward if runs_again else again
    launches = more["input_gradient"] + more["weight_gradient"]
    launches += _more(runs_again, costs, "forward") if runs_again else 0
    backward = to_ns(compute_s(layer.input_gradient + layer.weight_gradient + again, device, launches))
    weights = min(backward, to_ns(compute_s(layer.weight_gradient, device, more["weight_gradient"])))
    return LayerTimes((forward, backward, backward - weights, weights))


def _more(layer: Layer, costs: CallCosts, name: str) -> int:
    """Return how many more launches than kernels a pass of a layer with all of its experts has."""
    casts = sum(num_casts(region.products, costs.plan, name) for region in layer.regions)
    return casts + more_launches(layer.experts, costs, layer.experts.num_experts if layer.experts else 0, name)


def _shared(layer: Layer, costs: CallCosts, *, splits: bool) -> LayerTimes:
    forward, backward, inputs, weights = passes = tuple(PassTimeline(costs) for _ in range(4))
    forward_of(layer, forward)
    backward_of(layer, backward)
    if splits:
        backward_of(layer, inputs, weights=False)
        backward_of(layer, weights, inputs=False)
    durations = (forward.total_ns, backward.total_ns, inputs.total_ns, weights.total_ns)
    return LayerTimes(durations, tuple(tuple(each.calls) for each in passes))


def output_bytes(layer: Layer, workload: Workload, plan: Plan) -> int:
    """Return the bytes of a micro-batch's output on one rank, as it is sent to the next stage."""
    if plan.precision is None and not is_shared(plan):
        return layer.output_bytes
    return round(layer.output_bytes * widths_of(workload, plan).activations / Shares.of(layer, plan).outside)


def local_layers(layers: Sequence[Layer], kinds: Sequence[int], plan: Plan) -> tuple[Layer, ...]:
    """Return the layers with the parameters of one rank: of the ranks that hold most, where they do not divide.

    Layers of one kind, which differ in their name alone, are divided and checked once.
    """
    if plan.tensor * plan.expert == 1:
        return tuple(layers)
    known: dict[int, Layer] = {}
    made = []
    for kind, layer in zip(kinds, layers, strict=True):
        if kind not in known:
            local = _with_sizes(layer, _own(layer, plan))
            known[kind] = changed(local, base_bytes=layer.base_bytes and (base_on_a_rank(layer, plan), 0.0, 0.0, 0.0))
        made.append(changed(known[kind], name=layer.name))
    return tuple(made)


def base_on_a_rank(layer: Layer, plan: Plan) -> float:
    """Return the bytes of a layer's frozen base on one rank, before stage 3 shards them."""
    whole, divided, of_experts, _ = layer.base_bytes or (0.0,) * 4
    most = layer.experts.most_on_a_rank(plan.expert) / layer.experts.num_experts if layer.experts else 1.0
    return whole + divided / plan.tensor + of_experts * most


def of_experts(layers: Sequence[Layer], kinds: Sequence[int], *, experts: bool) -> tuple[Tensors, ...]:
    """Return of each layer its experts' parameters alone, or all others alone."""
    known: dict[int, Tensors] = {}
    for kind, layer in zip(kinds, layers, strict=True):
        if kind not in known:
            rows = zip(layer.parameter_sizes, layer.shapes, _axes(layer), strict=True)
            kept = [(size, shape) for size, shape, axis in rows if (axis == "expert") == experts]
            known[kind] = Tensors(tuple(size for size, _ in kept), tuple(shape for _, shape in kept))
    return tuple(known[kind] for kind in kinds)


def _axes(layer: Layer) -> Sequence[str]:
    axis = "tensor" if 0 < layer.tensor_parameters == layer.num_parameters else ""
    return layer.parameter_axes or [axis] * len(layer.parameter_sizes)


def _own(layer: Layer, plan: Plan) -> list[int]:
    """Return the elements of each parameter tensor on a rank: an even part, or all or nothing of an expert's tensor.

    Experts' tensors are listed expert by expert; the first rank has the first ones.
    """
    axes, held = _axes(layer), len(layer.parameter_sizes)
    if layer.experts:
        held = axes.count("expert") // layer.experts.num_experts * layer.experts.most_on_a_rank(plan.expert)
    number, found = 0, []
    for size, axis in zip(layer.parameter_sizes, axes, strict=True):
        found.append(-(-size // plan.tensor) if axis == "tensor" else size if axis != "expert" or number < held else 0)
        number += axis == "expert"
    return found


def _with_sizes(layer: Layer, sizes: Sequence[int]) -> Layer:
    """Return the layer with other parameters; those of size 0 are gone, and divided ones are seen as vectors."""
    kept, axes = [index for index, size in enumerate(sizes) if size], layer.parameter_axes
    rows = zip(layer.shapes, sizes, layer.parameter_sizes, strict=True)
    shapes = [shape if size == whole else _cut(shape, size) for shape, size, whole in rows if size]
    return changed(
        layer,
        parameter_sizes=tuple(sizes[index] for index in kept),
        parameter_shapes=tuple(shapes),
        parameter_axes=tuple(axes[index] for index in kept) if axes else (),
        tensor_parameters=sum(sizes[index] for index in kept if axes[index] == "tensor") if axes else 0,
    )


def _cut(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the shape of a part from its number of elements: fewer rows, else fewer columns, else a vector."""
    rest = 1
    for length in shape[1:]:
        rest *= length
    if size % rest == 0:
        return (size // rest, *shape[1:])
    return (shape[0], size // shape[0]) if len(shape) == 2 and size % shape[0] == 0 else (size,)
