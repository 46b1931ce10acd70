"""Units of sharding: which layers are gathered and freed together, and what each unit's calls cost.

The blocks of a model, the layers whose names end in a number, form units of `unit_layers` each. All other layers
(embedding, last norm, head) are the root unit, number 0: its parameters are gathered first, stay until the end of
backward, and may belong to layers at both ends of the model. Where no layer is a block, all of them count as blocks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from distlab.plan import Layer, Plan, Work, make_units
from simulator.gradients.buckets import BucketCost, Transfer
from simulator.gradients.shard_costs import Shards
from simulator.hardware.cost import compute_s
from simulator.precision import Widths
from simulator.units import to_ns

# What our Python costs the computing rank, in kernels. On a CPU, where it was timed, a kernel costs what an operator of
# torch does, kernel_s, and each of these is an operator or about as dear. Presets of GPUs have kernel_s = 0, so there
# it is free: the host runs ahead of the device, which sees no view and no hook.
VIEW_KERNELS = 2  # a tensor of a unit that is shown: split and view it, and put the view where its module looks
UNIT_KERNELS = 6  # a unit, once a pass: its hook, resizing the buffer, casting the shard, the autograd function
PIECE_KERNELS = 8  # a piece of the own shard: is it finite, narrow and view its gradient, hand it to its parameter


class Unit(NamedTuple):
    """Layers whose parameters live in one flat buffer.

    Attributes:
        name: "unit 3".
        layers: their numbers, rising.
        sizes: elements of each of their parameter tensors.
        is_root: whether it stays gathered from the start of forward to the end of backward.
    """

    name: str
    layers: tuple[int, ...]
    sizes: tuple[int, ...]
    is_root: bool

    @property
    def num_elements(self) -> int:
        """Elements of its parameters."""
        return sum(self.sizes)


def units_of(layers: Sequence[Layer], unit_layers: int) -> tuple[Unit, ...]:
    """Return the units in the order in which forward needs them, the root first; units without parameters left out."""
    blocks = [number for number, layer in enumerate(layers) if re.search(r"\d$", layer.name)]
    blocks = blocks or list(range(len(layers)))
    rest = tuple(number for number in range(len(layers)) if number not in set(blocks))
    groups = [tuple(blocks[start:stop]) for start, stop in make_units(len(blocks), unit_layers)]
    owned = [(layers_of, sum((layers[n].parameter_sizes for n in layers_of), ())) for layers_of in (rest, *groups)]
    kept = [(layers_of, sizes) for layers_of, sizes in owned if sizes]
    return tuple(
        Unit(f"unit {index}", layers_of, sizes, is_root=layers_of == rest)
        for index, (layers_of, sizes) in enumerate(kept)
    )


def peak_gathered_elements(units: Sequence[Unit], prefetch: int, *, reshard_after_forward: bool = True) -> int:
    """Return the most elements that are whole at once: the root, one unit and those fetched ahead of it."""
    sizes = [unit.num_elements for unit in units if not unit.is_root]
    root = sum(unit.num_elements for unit in units if unit.is_root)
    if not reshard_after_forward or not sizes:
        return root + sum(sizes)
    return root + max(sum(sizes[first : first + prefetch + 1]) for first in range(len(sizes)))


class UnitTimes(NamedTuple):
    """What the calls of one unit cost.

    Attributes:
        unit: the unit.
        gather: all-gather of its parameters.
        start_ns: time of the computing rank to start the gather.
        show_ns: time to put views of the gathered parameters where the layers look for them.
        scatter: reduce-scatter of its gradients, and what follows it among replicas.
        pack_ns: time to copy its gradients into the send buffer and to start the scatter.
        unpack_ns: time to divide the sum of this rank's shard by the number of ranks.
        load: copy of its shard from the host to the device, or None.
        save: copy of its gradients' shard to the host, or None.
    """

    unit: Unit
    gather: Transfer
    start_ns: int
    show_ns: int
    scatter: tuple[Transfer, ...]
    pack_ns: int
    unpack_ns: int
    load: Transfer | None = None
    save: Transfer | None = None


def gathered_bytes(plan: Plan, widths: Widths, *, is_root: bool) -> int:
    """Return the bytes of a parameter that travels in a unit; a root's embedding and head stay as they are."""
    return 1 if plan.float8 == "gathers" and not is_root else widths.parameter


def _calls_of_parameters(
    num_elements: int, shards: Shards, widths: Widths, offload: str, sizes: Sequence[int] = (), *, width: int = 0
) -> dict[str, Any]:
    """Cost what stages 1 to 3 do alike: gather parameters of `width` bytes, and copy shards to and from the host."""
    has_copies, width = offload != "none", width or widths.parameter
    return {
        "gather": shards.gather(num_elements, width, sizes),
        "start_ns": shards.starting_ns("all_gather", num_elements, width),
        "load": shards.host_copy(num_elements, widths.parameter) if has_copies else None,
        "save": shards.host_copy(num_elements, widths.reduce) if has_copies else None,
    }


def time_units(units: Sequence[Unit], shards: Shards, widths: Widths, plan: Plan) -> tuple[UnitTimes, ...]:
    """Cost the calls of each unit."""
    device = shards.cluster.device

    def copies_ns(num_elements: int) -> int:
        """Return the time to read and write each gradient once."""
        return to_ns(compute_s(Work(memory_bytes=2 * num_elements * widths.reduce, num_kernels=1), device))

    @cache  # most units are alike
    def costs(sizes: tuple[int, ...], width: int) -> dict[str, Any]:
        num_elements, num_tensors = sum(sizes), len(sizes)
        starting_ns = shards.starting_ns("reduce_scatter", num_elements, widths.reduce)
        return {
            **_calls_of_parameters(num_elements, shards, widths, plan.sharding.offload, sizes, width=width),
            "show_ns": to_ns(compute_s(Work(num_kernels=VIEW_KERNELS * num_tensors + UNIT_KERNELS), device)),
            "scatter": shards.scatter(num_elements, widths.reduce, sizes),
            "pack_ns": copies_ns(num_elements) + starting_ns,
            "unpack_ns": copies_ns(shards.padded(num_elements) // shards.num_shards),
        }

    return tuple(
        UnitTimes(unit, **costs(unit.sizes, gathered_bytes(plan, widths, is_root=unit.is_root))) for unit in units
    )


def scattered(buckets: Sequence[BucketCost], shards: Shards, widths: Widths, offload: str) -> tuple[BucketCost, ...]:
    """Turn all-reduces of gradients into the calls of stages 1 and 2: scatter gradients, gather parameters."""

    @cache  # most buckets are alike
    def changes(gradient_bytes: int, num_tensors: int, pack_ns: int, unpack_ns: int) -> dict[str, Any]:
        size = gradient_bytes // widths.reduce
        own = shards.padded(size) // shards.num_shards * widths.reduce
        pieces = -(-num_tensors // shards.num_shards)
        check = Work(memory_bytes=own, num_kernels=PIECE_KERNELS * pieces)  # finite? then each piece gets its gradient
        parts = shards.scatter(size, widths.reduce)
        return {
            **_calls_of_parameters(size, shards, widths, offload),
            "kind": "reduce_scatter",
            "num_bytes": parts[0].num_bytes,
            "pack_ns": pack_ns + shards.starting_ns("reduce_scatter", size, widths.reduce),
            "unpack_ns": unpack_ns + to_ns(compute_s(check, shards.cluster.device)),
            "duration_ns": sum(part.duration_ns for part in parts),
            "sent_bytes": sum(part.sent_bytes for part in parts),
            "parts": parts,
        }

    return tuple(
        bucket._replace(
            name=bucket.name.replace("all_reduce", "reduce_scatter", 1),
            **changes(bucket.gradient_bytes, bucket.num_tensors, bucket.pack_ns, bucket.unpack_ns),
        )
        for bucket in buckets
    )
