"""Wrong versions of places, groups, shares of the batch, axes of gradients and the order of axes."""

from __future__ import annotations

from math import log2, prod

from torch import Tensor

from distlab.plan import Mesh

Axes = dict[str, int]


def place_first_fastest(rank: int, axes: Axes) -> Axes:
    """Let the first axis vary fastest."""
    place = {}
    for axis, size in axes.items():
        rank, place[axis] = divmod(rank, size)
    return place


def place_undivided(rank: int, axes: Axes) -> Axes:
    """Take the rest without dividing first."""
    return {axis: rank % size for axis, size in axes.items()}


def place_by_own_size(rank: int, axes: Axes) -> Axes:
    """Divide by the axis' own size."""
    last = list(axes)[-1]
    return {axis: rank % size if axis == last else rank // size % size for axis, size in axes.items()}


def place_without_rest(rank: int, axes: Axes) -> Axes:
    """Divide by the faster axes and take no rest."""
    names = list(axes)
    return {axis: rank // prod(axes[name] for name in names[names.index(axis) + 1 :]) for axis in names}


def place_from_one(rank: int, axes: Axes) -> Axes:
    """Count places from 1."""
    return {axis: place + 1 for axis, place in Mesh(axes).coordinates(rank).items()}


def groups_of_neighbours(axis: str, axes: Axes) -> list[list[int]]:
    """Cut the ranks into runs of the axis' size."""
    size, world_size = axes[axis], prod(axes.values())
    return [list(range(first, first + size)) for first in range(0, world_size, size)]


def groups_far_apart(axis: str, axes: Axes) -> list[list[int]]:
    """Take ranks as far apart as can be."""
    size, world_size = axes[axis], prod(axes.values())
    stride = world_size // size
    return [list(range(first, world_size, stride)) for first in range(stride)]


def groups_of_one_place(axis: str, axes: Axes) -> list[list[int]]:
    """Put together the ranks that stand at one place of the axis."""
    mesh = Mesh(axes)
    return [[r for r in range(mesh.size) if mesh.coordinates(r)[axis] == place] for place in range(axes[axis])]


def groups_with_rank_0(axis: str, axes: Axes) -> list[list[int]]:
    """Return rank 0's group alone."""
    return [list(Mesh(axes).group_of(0, axis))]


def groups_of_the_first_block(axis: str, axes: Axes) -> list[list[int]]:
    """Forget that the pattern repeats along the slower axes."""
    names = list(axes)
    stride = prod(axes[name] for name in names[names.index(axis) + 1 :])
    return [[first + place * stride for place in range(axes[axis])] for first in range(stride)]


def part_by_rank(batch: Tensor, rank: int, mesh: Mesh, num_microbatches: int) -> list[Tensor]:
    """Give every rank samples of its own."""
    return list(batch.chunk(mesh.size)[rank].chunk(num_microbatches))


def part_by_rank_in_data(batch: Tensor, rank: int, mesh: Mesh, num_microbatches: int) -> list[Tensor]:
    """Take the rank modulo the number of replicas."""
    replicas = mesh.axis_size("data") * mesh.axis_size("expert")
    own = batch.chunk(replicas)[rank % replicas]
    return list(own.chunk(mesh.axis_size("context"), dim=1)[mesh.coordinates(rank)["context"]].chunk(num_microbatches))


def _cut(batch: Tensor, replica: int, replicas: int, context: tuple[int, int], num_microbatches: int) -> list[Tensor]:
    place, size = context
    return list(batch.chunk(replicas)[replica].chunk(size, dim=1)[place].chunk(num_microbatches))


def part_of_first(batch: Tensor, rank: int, mesh: Mesh, num_microbatches: int) -> list[Tensor]:
    """Give every replica the first samples, as a sampler with one seed and no rank does."""
    replicas = mesh.axis_size("data") * mesh.axis_size("expert")
    context = mesh.coordinates(rank)["context"], mesh.axis_size("context")
    return _cut(batch, 0, replicas, context, num_microbatches)


def part_without_expert(batch: Tensor, rank: int, mesh: Mesh, num_microbatches: int) -> list[Tensor]:
    """Cut the samples over data alone."""
    place = mesh.coordinates(rank)
    context = place["context"], mesh.axis_size("context")
    return _cut(batch, place["data"], mesh.axis_size("data"), context, num_microbatches)


def part_without_context(batch: Tensor, rank: int, mesh: Mesh, num_microbatches: int) -> list[Tensor]:
    """Keep all positions."""
    place, experts = mesh.coordinates(rank), mesh.axis_size("expert")
    replica = place["data"] * experts + place["expert"]
    return _cut(batch, replica, mesh.axis_size("data") * experts, (0, 1), num_microbatches)


def part_in_one(batch: Tensor, rank: int, mesh: Mesh, num_microbatches: int) -> list[Tensor]:
    """Forget to cut into micro-batches."""
    place, experts = mesh.coordinates(rank), mesh.axis_size("expert")
    replica = place["data"] * experts + place["expert"]
    return _cut(batch, replica, mesh.axis_size("data") * experts, (place["context"], mesh.axis_size("context")), 1)


def part_overlapping(batch: Tensor, rank: int, mesh: Mesh, num_microbatches: int) -> list[Tensor]:
    """Number the replicas data + expert, so that two have one number."""
    place, experts = mesh.coordinates(rank), mesh.axis_size("expert")
    context = place["context"], mesh.axis_size("context")
    replica = place["data"] + place["expert"]
    return _cut(batch, replica, mesh.axis_size("data") * experts, context, num_microbatches)


def _right(kind: str, axes: Axes, sequence_parallel: bool) -> tuple[list[str], int]:
    summed = [axis for axis in ("data", "expert", "context") if (kind, axis) != ("expert", "expert")]
    summed += ["tensor"] * (kind == "norm" and sequence_parallel) + ["pipeline"] * (kind == "tied")
    return summed, axes["data"] * axes["expert"] * axes["context"]


def axes_over_world(kind: str, axes: Axes, sequence_parallel: bool) -> tuple[list[str], int]:
    """Divide by the number of all ranks."""
    return _right(kind, axes, sequence_parallel)[0], prod(axes.values())


def axes_sum(kind: str, axes: Axes, sequence_parallel: bool) -> tuple[list[str], int]:
    """Do not divide."""
    return _right(kind, axes, sequence_parallel)[0], 1


def axes_over_data(kind: str, axes: Axes, sequence_parallel: bool) -> tuple[list[str], int]:
    """Divide by the number of data ranks."""
    return _right(kind, axes, sequence_parallel)[0], axes["data"]


def axes_over_summed(kind: str, axes: Axes, sequence_parallel: bool) -> tuple[list[str], int]:
    """Divide by the number of gradients that were summed."""
    summed = _right(kind, axes, sequence_parallel)[0]
    return summed, prod(axes[axis] for axis in summed)


def axes_data_only(kind: str, axes: Axes, sequence_parallel: bool) -> tuple[list[str], int]:
    """Treat context and experts as tensor parallelism: sum over data alone."""
    summed, number = _right(kind, axes, sequence_parallel)
    return [axis for axis in summed if axis != "context"], number


def axes_all(kind: str, axes: Axes, sequence_parallel: bool) -> tuple[list[str], int]:
    """Sum over every axis, as one all-reduce over all ranks does."""
    return list(axes), axes["data"] * axes["expert"] * axes["context"]


def axes_norm_forgotten(kind: str, axes: Axes, sequence_parallel: bool) -> tuple[list[str], int]:
    """Leave norms as they are with sequence parallelism."""
    return _right(kind, axes, False)


def axes_norm_always(kind: str, axes: Axes, sequence_parallel: bool) -> tuple[list[str], int]:
    """Sum norms over tensor also where every rank has found the whole."""
    return _right(kind, axes, True)


def axes_tied_forgotten(kind: str, axes: Axes, sequence_parallel: bool) -> tuple[list[str], int]:
    """Leave the two copies of a tied embedding apart."""
    return _right("matrix" if kind == "tied" else kind, axes, sequence_parallel)


def axes_experts_mixed(kind: str, axes: Axes, sequence_parallel: bool) -> tuple[list[str], int]:
    """Average experts as every other parameter."""
    return _right("matrix" if kind == "expert" else kind, axes, sequence_parallel)


def order_given(axes: Axes, traffic: dict[str, float], devices_per_node: int) -> list[str]:
    """Keep the order of the dict."""
    return list(axes)


def order_busiest_slowest(axes: Axes, traffic: dict[str, float], devices_per_node: int) -> list[str]:
    """Put the axis that sends most first, where it varies slowest."""
    return sorted(axes, key=lambda axis: -traffic[axis])


def order_busiest_fastest(axes: Axes, traffic: dict[str, float], devices_per_node: int) -> list[str]:
    """Sort by what is sent, whether it fits or not."""
    return sorted(axes, key=lambda axis: traffic[axis])


def order_largest_fastest(axes: Axes, traffic: dict[str, float], devices_per_node: int) -> list[str]:
    """Put the largest axis last."""
    return sorted(axes, key=lambda axis: axes[axis])


def order_fitting_first(axes: Axes, traffic: dict[str, float], devices_per_node: int) -> list[str]:
    """Take the busiest axis that fits a node by itself, and forget what the others leave of it."""
    return sorted(axes, key=lambda axis: (axes[axis] <= devices_per_node, traffic[axis]))


def _as_they_fit(wanted: list[str], axes: Axes, room: int) -> list[str]:
    """Take axes into a node as long as they fit."""
    inside = []
    for axis in wanted:
        if axes[axis] <= room:
            inside.append(axis)
            room //= axes[axis]
    return [axis for axis in axes if axis not in inside] + inside[::-1]


def order_by_greed(axes: Axes, traffic: dict[str, float], devices_per_node: int) -> list[str]:
    """Take axes into a node by their traffic, busiest first, as long as they fit."""
    return _as_they_fit(sorted(axes, key=lambda name: -traffic[name]), axes, devices_per_node)


def order_by_bits(axes: Axes, traffic: dict[str, float], devices_per_node: int) -> list[str]:
    """Take axes into a node by what they send for each bit of a rank's number that they use up."""
    part = {axis: traffic[axis] / log2(size) if size > 1 else 0.0 for axis, size in axes.items()}
    return _as_they_fit(sorted(axes, key=lambda name: -part[name]), axes, devices_per_node)


def axes_twice(kind: str, axes: Axes, sequence_parallel: bool) -> tuple[list[str], int]:
    """Sum over data twice."""
    summed = ["data", "context", "data"] + ["expert"] * (kind != "expert")
    summed += ["tensor"] * (kind == "norm" and sequence_parallel) + ["pipeline"] * (kind == "tied")
    return summed, axes["data"] * axes["expert"] * axes["context"]


def part_scattered(batch: Tensor, rank: int, mesh: Mesh, num_microbatches: int) -> list[Tensor]:
    """Take every so many-th position."""
    axes, place = dict(mesh.axes), mesh.coordinates(rank)
    own = batch.chunk(axes["data"] * axes["expert"])[place["data"] * axes["expert"] + place["expert"]]
    return list(own[:, place["context"] :: axes["context"]].chunk(num_microbatches))
