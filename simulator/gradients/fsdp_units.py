"""What sharding costs: which layers are gathered and freed together, and what gathers, scatters and offloading take.

The blocks of a model, the layers whose names end in a number, form units of `unit_layers` each. All other layers
(embedding, last norm, head) are the root unit, number 0: its parameters are gathered first, stay until the end of
backward, and may belong to layers at both ends of the model. Where no layer is a block, all of them count as blocks.

Ranks with equal copies of the parameters share them out: replicas, and ranks that split the positions. With `replicas`
in the plan these ranks form several sets (hybrid sharding). Neighbouring ranks, which share a node where they fit, hold
one set: they gather and scatter. Ranks with the same shard in different sets then sum their gradients of it, 1/s of the
bytes, over the slower links.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

from distlab.plan import Cluster, Layer, Plan, Work
from simulator.gradients.buckets import BucketCost, Transfer
from simulator.hardware.cost import all_reduce_s, all_reduce_steps, compute_s
from simulator.hardware.rank_layout import COPIES, Group, Links, RankLayout, group_of
from simulator.units import Widths, to_ns

# What our Python costs the computing rank, in kernels. On a CPU, where it was timed, a kernel costs what an operator of
# torch does, kernel_s, and each of these is an operator or about as dear. Presets of GPUs have kernel_s = 0, so there
# it is free: the host runs ahead of the device, which sees no view and no hook.
VIEW_KERNELS = 2  # a tensor of a unit that is shown: split and view it, and put the view where its module looks
UNIT_KERNELS = 6  # a unit, once a pass: its hook, resizing the buffer, casting the shard, the autograd function
PIECE_KERNELS = 8  # a piece of the own shard: is it finite, narrow and view its gradient, hand it to its parameter
Rows = tuple[tuple[int, ...], ...]
NO_SCATTER = (Transfer("reduce_scatter", 0, 0, 0.0),)  # of a unit that is all frozen
FAULT_BYTES = 6  # one for each code of a gradient: used, unused, sparse, twice, moved, not finite


class Unit(NamedTuple):
    """Layers whose parameters live in one flat buffer.

    Attributes:
        name: "unit 3".
        layers: their numbers, rising.
        sizes: elements of each of their parameter tensors.
        is_root: whether it stays gathered from the start of forward to the end of backward.
        base_bytes: of frozen weights, which are gathered too.
        experts: like `sizes`, of experts where expert ranks share them: other ranks have copies of these.
    """

    name: str
    layers: tuple[int, ...]
    sizes: tuple[int, ...]
    is_root: bool
    base_bytes: float = 0.0
    experts: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        """Elements of its parameters."""
        return sum(self.sizes) + sum(self.experts)


def units_of(layers: Sequence[Layer], unit_layers: int, *, apart: bool = False) -> tuple[Unit, ...]:
    """Return the units in the order in which forward needs them, the root first; units without parameters left out.

    `apart` lists experts' parameters by themselves.
    """

    def sizes(numbers: Sequence[int], *, experts: bool) -> tuple[int, ...]:
        if not apart:
            return () if experts else sum((layers[n].parameter_sizes for n in numbers), ())
        own = ((layers[n].parameter_sizes, layers[n].parameter_axes) for n in numbers)
        pairs = (pair for sizes, axes in own for pair in zip(sizes, axes or ("",) * len(sizes), strict=True))
        return tuple(size for size, axis in pairs if (axis == "expert") == experts)

    blocks = [number for number, layer in enumerate(layers) if re.search(r"\d$", layer.name)]
    blocks = blocks or list(range(len(layers)))
    rest = tuple(number for number in range(len(layers)) if number not in set(blocks))
    groups = [tuple(blocks[start : start + unit_layers]) for start in range(0, len(blocks), unit_layers)]
    made = [
        Unit("", each, sizes(each, experts=False), each == rest, sum(sum(layers[n].base_bytes[:3]) for n in each))
        for each in (rest, *groups)
    ]
    made = [unit._replace(experts=sizes(unit.layers, experts=True)) for unit in made] if apart else made
    kept = [unit for unit in made if unit.sizes or unit.experts or unit.base_bytes]
    return tuple(unit._replace(name=f"unit {index}") for index, unit in enumerate(kept))


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
        show_ns: time to put views of the gathered parameters where the layers look for them.
        scatter: reduce-scatter of its gradients, and what follows it among replicas.
        pack_ns: time to copy its gradients into the send buffer.
        unpack_ns: time to divide the sum of this rank's shard by the number of ranks.
        load: copy of its shard from the host to the device, or None.
        save: copy of its gradients' shard to the host, or None.
    """

    unit: Unit
    gather: Transfer
    show_ns: int
    scatter: tuple[Transfer, ...]
    pack_ns: int
    unpack_ns: int
    load: Transfer | None = None
    save: Transfer | None = None


@dataclass(frozen=True)
class Shards:
    """The ranks of a stage with equal copies: sets of `num_shards`, `replicas` of them.

    Attributes:
        cluster: where they are.
        copies: groups of ranks with equal copies, those that sit alike in their nodes once.
        num_shards: ranks that one set of shards is spread over.
        replicas: sets.
        links: the measured link of a kind of call, where there is one.
    """

    cluster: Cluster
    copies: Rows
    num_shards: int
    replicas: int = 1
    links: Links = field(default_factory=dict)
    _known: dict[tuple[str, int], Transfer] = field(default_factory=dict)

    def padded(self, num_elements: int) -> int:
        """Return the elements of a flat buffer that is cut into equal shards."""
        return -(-num_elements // self.num_shards) * self.num_shards

    def gather(self, num_elements: int, bytes_each: int, sizes: Sequence[int] = ()) -> Transfer:
        """Return the all-gather of a flat buffer; `sizes`: of tensors that are gathered one by one where they are so.

        Cost: (s-1)/s of its bytes sent per rank, in s - 1 steps per call.
        """
        return self._calls("all_gather", num_elements, bytes_each, sizes)

    def scatter(self, num_elements: int, bytes_each: int, sizes: Sequence[int] = ()) -> tuple[Transfer, ...]:
        """Return the reduce-scatter of a flat buffer, and the all-reduce of the shard where there are replicas.

        Cost: (s-1)/s of its bytes sent per rank, in s - 1 steps per call, and 2(r-1)/r of a shard's.
        """
        whole = self.padded(num_elements) * bytes_each
        own = self._calls("reduce_scatter", num_elements, bytes_each, sizes)
        return (own,) if self.replicas == 1 else (own, self._across_sets(whole // self.num_shards))

    def faults(self, num_tensors: int) -> Transfer:
        """Return the small all-reduce over all ranks that tells them what became of each tensor's gradient.

        Cost: FAULT_BYTES per tensor, summed by a ring.
        """
        num_bytes = FAULT_BYTES * num_tensors
        groups = self._groups(self.copies)
        time_ns = max(group.exchange_ns("all_reduce", num_bytes) for group in groups)
        return Transfer("all_reduce", num_bytes, time_ns, groups[0].sent_bytes("all_reduce", num_bytes))

    def host_copy(self, num_elements: int, bytes_each: int) -> Transfer:
        """Return the copy of a shard between a device and its host."""
        num_bytes = self.padded(num_elements) // self.num_shards * bytes_each
        return Transfer("copy", num_bytes, to_ns(num_bytes / self.cluster.device.host_link_bytes_per_s), 0.0)

    def _calls(self, kind: str, num_elements: int, bytes_each: int, sizes: Sequence[int]) -> Transfer:
        """Cost one call, or one for each tensor: then a rank also cuts each tensor into a slice for every rank."""
        slice_s = self.cluster.software.slice_s
        if not (slice_s and sizes and self.num_shards > 1):
            return self._in_a_set(kind, self.padded(num_elements) * bytes_each)
        calls = [self._in_a_set(kind, self.padded(size) * bytes_each) for size in sizes]
        duration_ns = sum(call.duration_ns for call in calls) + to_ns(len(sizes) * self.num_shards * slice_s)
        num_bytes, sent = sum(call.num_bytes for call in calls), sum(call.sent_bytes for call in calls)
        return Transfer(kind, num_bytes, duration_ns, sent)

    def _in_a_set(self, kind: str, num_bytes: int) -> Transfer:
        """Cost a ring in a set, equal ones once; of several sets, which wait for one another, the slowest counts."""
        if (kind, num_bytes) not in self._known:
            groups = self._groups(self._sets)
            share = num_bytes // self.num_shards if kind == "all_gather" else num_bytes
            time_ns = max(group.exchange_ns(kind, share) for group in groups)
            self._known[kind, num_bytes] = Transfer(kind, num_bytes, time_ns, groups[0].sent_bytes(kind, share))
        return self._known[kind, num_bytes]

    def _across_sets(self, shard_bytes: int) -> Transfer:
        """Cost the ring of the ranks that hold one shard; the slowest of several counts here too.

        One that spans nodes, with neighbours in one of them, is as slow as the slower of its links.
        """
        links = [own] if (own := self.links.get("all_reduce")) else []
        for group in () if links else self._groups(self._rings):
            links += [group.cluster.inter_node] * (not group.is_in_one_node)
            links += [group.cluster.intra_node] * (group.is_in_one_node or group.ranks_per_node != 1)
        seconds = max(all_reduce_s(shard_bytes, self.replicas, link) for link in set(links))
        sent = all_reduce_steps(self.replicas).bytes_factor * shard_bytes
        return Transfer("all_reduce", shard_bytes, to_ns(seconds), sent)

    @cached_property
    def _sets(self) -> Rows:
        starts = range(0, self.num_shards * self.replicas, self.num_shards)
        return self._moved([ranks[start : start + self.num_shards] for ranks in self.copies for start in starts])

    @cached_property
    def _rings(self) -> Rows:
        places = range(self.num_shards)
        return self._moved([ranks[place :: self.num_shards] for ranks in self.copies for place in places])

    def _moved(self, rows: Sequence[tuple[int, ...]]) -> Rows:
        """Return the ranks of groups moved to the first node, those that sit alike in their nodes once."""
        per_node = self.cluster.devices_per_node
        return tuple(sorted({tuple(rank - row[0] // per_node * per_node for rank in row) for row in rows}))

    def _groups(self, rows: Rows) -> list[Group]:
        return [group_of(self.cluster, row, self.links) for row in rows]


def shards_of(layout: RankLayout, pipeline: int = 0, *, axes: Sequence[str] = COPIES) -> Shards:
    """Return the sets of shards of the ranks at a place in the pipeline: those along `axes` have equal copies."""
    rows, plan = layout.rows(axes, pipeline), layout.plan
    num_shards = plan.sharding.num_shards(len(rows[0]))
    return Shards(layout.cluster, rows, num_shards, plan.sharding.replicas, layout.links)


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
        "load": shards.host_copy(num_elements, widths.parameter) if has_copies else None,
        "save": shards.host_copy(num_elements, widths.reduce) if has_copies else None,
    }


def time_units(
    units: Sequence[Unit], shards: Shards, widths: Widths, plan: Plan, few: Shards | None = None
) -> tuple[UnitTimes, ...]:
    """Cost the calls of each unit; those of its experts, among the ranks of `few`, come behind the others."""
    everyone, device = shards, shards.cluster.device

    def copies_ns(num_elements: int) -> int:
        """Return the time to read and write each gradient once."""
        return to_ns(compute_s(Work(memory_bytes=2 * num_elements * widths.reduce, num_kernels=1), device))

    @cache  # most units are alike
    def costs(sizes: tuple[int, ...], base_bytes: float, width: int, *, experts: bool = False) -> dict[str, Any]:
        shards = few if few and experts else everyone
        num_elements, num_tensors, offload = sum(sizes), len(sizes), plan.sharding.offload
        base = math.ceil(base_bytes / widths.parameter)
        load = {"load": shards.host_copy(num_elements + base, widths.parameter)} if offload == "all" else {}
        return {
            **_calls_of_parameters(num_elements, shards, widths, offload, sizes, width=width),
            **load,
            "gather": shards.gather(num_elements + base, width, (*sizes, base) if base else sizes),
            "show_ns": to_ns(compute_s(Work(num_kernels=VIEW_KERNELS * num_tensors + UNIT_KERNELS), device)),
            "scatter": shards.scatter(num_elements, widths.reduce, sizes) if sizes else NO_SCATTER,
            "pack_ns": copies_ns(num_elements),
            "unpack_ns": copies_ns(shards.padded(num_elements) // shards.num_shards),
        }

    found = []
    for unit in units:
        width = gathered_bytes(plan, widths, is_root=unit.is_root)
        own = costs(unit.sizes, unit.base_bytes, width)
        if unit.experts:
            more = costs(unit.experts, 0.0, width, experts=True)
            own = {name: _together(value, more[name]) for name, value in own.items()}
        found.append(UnitTimes(unit, **own))
    return tuple(found)


def _together(one: Any, other: Any) -> Any:
    """Return two durations or calls, one after the other, as one."""
    if not isinstance(one, Transfer):
        return one and one + other
    return Transfer(one.kind, *(own + more for own, more in zip(one[1:], other[1:], strict=True)))


def scattering(shards: Shards, widths: Widths, offload: str) -> Callable[[BucketCost], BucketCost]:
    """Return what turns an all-reduce of gradients into the calls of stages 1 and 2: scatter, and gather parameters."""

    def scattered(bucket: BucketCost) -> BucketCost:
        size = bucket.gradient_bytes // widths.reduce
        own = shards.padded(size) // shards.num_shards * widths.reduce
        pieces = -(-bucket.num_tensors // shards.num_shards)
        check = Work(memory_bytes=own, num_kernels=PIECE_KERNELS * pieces)  # finite? then each piece gets its gradient
        parts = shards.scatter(size, widths.reduce)
        return bucket._replace(
            **_calls_of_parameters(size, shards, widths, offload),
            kind="reduce_scatter",
            num_bytes=parts[0].num_bytes,
            unpack_ns=bucket.unpack_ns + to_ns(compute_s(check, shards.cluster.device)),
            duration_ns=sum(part.duration_ns for part in parts),
            sent_bytes=sum(part.sent_bytes for part in parts),
            parts=parts,
        )

    return scattered
