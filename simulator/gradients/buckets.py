"""The cost of each bucket of gradients that a stage's replicas exchange, with copies and compression, in nanoseconds.

A bucket is packed (and encoded), sent, and unpacked (and decoded). Without compression one all-reduce carries the
gradients. With compression, `exchanges` says what travels instead. PowerSGD alone sends a second time, after it has
worked on what it received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from distlab.plan import Cluster, Layer, Plan, Work, assign_buckets
from distlab.plan.compression import Exchange, exchanges
from simulator.gradients.compression import CodecTimes, MeasuredCodec, codec_times
from simulator.hardware.cost import compute_s
from simulator.hardware.rank_layout import Group
from simulator.units import to_ns

Costs = Callable[[int, int], "BucketCost"]
LEAST_COPIES = 40  # that a bucket is made for, of software with buckets of its own


class Tensors(NamedTuple):
    """Some of a layer's parameter tensors: elements of each, and shapes."""

    parameter_sizes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


class Transfer(NamedTuple):
    """One call, costed.

    Attributes:
        kind: all_reduce, reduce_scatter, all_gather, or copy between a device and its host.
        num_bytes: of the whole that is summed, scattered or gathered.
        duration_ns: how long it takes alone.
        sent_bytes: what a rank's link carries for it, one way, by ring algorithms.
    """

    kind: str
    num_bytes: int
    duration_ns: int
    sent_bytes: float


class Later(NamedTuple):
    """The second call of a bucket: time computed before it, its kind, bytes and duration, time computed meanwhile."""

    between_ns: int
    kind: str
    num_bytes: int
    duration_ns: int
    after_ns: int


class BucketCost(NamedTuple):
    """One bucket of gradients on its way to the mean.

    Attributes:
        name: what a reader sees.
        layer: layer of the stage (0 first) whose backward makes the last of its gradients.
        num_bytes: payload of this rank's calls, without the second one.
        pack_ns: copying the gradients into a buffer and dividing or encoding them, before.
        duration_ns: the all-reduce, or what compression sends instead.
        unpack_ns: copying the mean back, or decoding it, after.
        kind: the call that travels: all_reduce or all_gather.
        gradient_bytes: bytes of its gradients.
        sent_bytes: what a rank's link carries for it, one way, by ring algorithms.
        compressed: whether it is encoded.
        later: the second call, where there is one.
        num_tensors: parameters in it.
        parts: the calls that follow one another on the wire, where there are several (shards, then replicas).
        gather: the all-gather of the parameters after the update, where each rank updates only its own.
        save: the copy of the gradients' shard to the host, where the host updates.
        load: the copy of the updated shard back to the device.
    """

    name: str
    layer: int
    num_bytes: int
    pack_ns: int
    duration_ns: int
    unpack_ns: int
    kind: str = "all_reduce"
    gradient_bytes: int = 0
    sent_bytes: float = 0.0
    compressed: bool = False
    later: Later | None = None
    num_tensors: int = 0
    parts: tuple[Transfer, ...] = ()
    gather: Transfer | None = None
    save: Transfer | None = None
    load: Transfer | None = None

    @property
    def what(self) -> str:
        """Its name without the call: "bucket 3"."""
        return self.name.removeprefix(f"{self.kind} ")


def costs_in(group: Group, gradient_sync: str, change: Callable[[BucketCost], BucketCost] | None = None) -> Costs:
    """Return what a bucket without a name costs in a group, from its bytes and tensors: copies and an all-reduce.

    `change` makes other calls of the all-reduce.
    """

    @cache  # blocks are alike, and so are most buckets
    def costs(num_bytes: int, num_tensors: int) -> BucketCost:
        copies = _copies(num_bytes, num_tensors, gradient_sync, in_place=group.cluster.software.flat_buffers)
        pack_ns, unpack_ns = (to_ns(compute_s(work, group.cluster.device)) for work in copies)
        took_ns, sent = group.exchange_ns("all_reduce", num_bytes), group.sent_bytes("all_reduce", num_bytes)
        calls = ("all_reduce", num_bytes, sent, False, None, num_tensors)
        plain = BucketCost("", 0, num_bytes, pack_ns, took_ns, unpack_ns, *calls)
        return change(plain) if change else plain

    return costs


def cost_buckets(
    layers: Sequence[Layer | Tensors],
    bytes_per_parameter: int,
    *,
    group: Group,
    costs: Costs,
    plan: Plan,
    codec: MeasuredCodec | None = None,
    whose: str = "",
) -> tuple[BucketCost, ...]:
    """Return what a stage exchanges, in the order in which it starts; each name ends with `whose`."""
    sizes = [size * bytes_per_parameter for layer in layers for size in layer.parameter_sizes]
    if group.num_ranks == 1 or not sizes:
        return ()
    owner = [number for number, layer in enumerate(layers) for _ in layer.parameter_sizes]
    shapes = [shape for layer in layers for shape in layer.shapes] if plan.compression else []

    def cost(what: str, parameters: tuple[int, ...], num_bytes: int) -> BucketCost:
        layer = min(owner[parameters[0]], owner[parameters[-1]])  # parameters rise or fall, and owners with them
        alike = costs(num_bytes, len(parameters))
        found = BucketCost(f"{alike.kind} {what}{whose}", layer, *alike[2:])
        if plan.compression is None:
            return found
        bucket = [shapes[index] for index in parameters]
        if codec is not None:
            times = codec.times(num_bytes)
        else:
            extra = {"num_ranks": group.num_ranks, "bytes_per_element": bytes_per_parameter}
            times = codec_times(plan.compression, bucket, device=group.cluster.device, **extra)
        return _compressed(found, times, exchanges(plan.compression, bucket, bytes_per_parameter), group)

    if plan.gradient_sync == "per_parameter":
        return tuple(cost(f"parameter {number}", (number,), size) for number, size in enumerate(sizes))
    if plan.gradient_sync == "flat":
        return (cost("all gradients", tuple(range(len(sizes))), sum(sizes)),)
    buckets = _buckets(tuple(sizes), *_capacities(plan, group.cluster, bytes_per_parameter))
    return tuple(cost(f"bucket {bucket.index}", bucket.parameters, bucket.num_bytes) for bucket in buckets)


def _capacities(plan: Plan, cluster: Cluster, bytes_per_parameter: int) -> tuple[int, int | None]:
    """Return the bytes of a bucket, and of the first one where it is smaller: the software's own unless the plan says.

    Source: NVIDIA/Megatron-LM, megatron/core/distributed/distributed_data_parallel.py, 2024: max(40e6, 1e6 x copies)
        elements, so that each copy's part of a bucket stays long.
    """
    says_nothing = (plan.bucket_bytes, plan.first_bucket_bytes) == (Plan.bucket_bytes, Plan.first_bucket_bytes)
    if cluster.software.bucket_elements and says_nothing:
        return cluster.software.bucket_elements * max(LEAST_COPIES, plan.copies) * bytes_per_parameter, None
    small_first = plan.gradient_sync == "overlapped" and plan.sharding.stage == 0
    return plan.bucket_bytes, plan.first_bucket_bytes if small_first else None


# Stages in the middle of a model are alike, and so are those of the next plan.
_buckets = lru_cache(maxsize=64)(assign_buckets)


def _compressed(plain: BucketCost, times: CodecTimes, calls: Sequence[Exchange], group: Group) -> BucketCost:
    """Return the cost of a bucket that sends these calls in place of its gradients.

    PowerSGD's last call carries the second factor, which is made from the first: it waits for the others.
    """
    *first, last = calls
    later = Later(times.between_ns, *last, group.exchange_ns(*last), times.after_ns) if first else None
    first = first or [last]
    kind = first[0].kind
    return plain._replace(
        name=plain.name.replace("all_reduce", kind, 1),
        num_bytes=sum(call.num_bytes for call in first),
        pack_ns=plain.pack_ns + times.encode_ns,
        duration_ns=sum(group.exchange_ns(*call) for call in first),
        unpack_ns=plain.unpack_ns + times.decode_ns,
        kind=kind,
        sent_bytes=sum(group.sent_bytes(*call) for call in calls),
        compressed=True,
        later=later,
    )


def _copies(num_bytes: int, num_tensors: int, gradient_sync: str, *, in_place: bool) -> tuple[Work, Work]:
    """Return the work before and after one all-reduce.

    Dividing reads and writes every gradient, and so does a copy. A parameter alone is divided in place. Flat and
    bucketed gradients are copied into a buffer, divided there, and copied back. Overlapped gradients live in the
    buffer. A hook divides each of them there, which costs about as much as a kernel; it also sums the gradient while it
    is in the cache, to see whether it is finite. Compression takes gradients undivided: a copy, which costs the same.
    With `in_place` gradients were made in the buffer, which one kernel divides.
    """
    one_pass = 2 * num_bytes
    if in_place:
        return Work(memory_bytes=one_pass, num_kernels=1), Work()
    if gradient_sync == "per_parameter":
        return Work(memory_bytes=one_pass, num_kernels=num_tensors), Work()
    if gradient_sync == "overlapped":
        return Work(memory_bytes=one_pass, num_kernels=3 * num_tensors), Work()
    copy = Work(memory_bytes=one_pass, num_kernels=num_tensors)
    return copy + Work(memory_bytes=one_pass, num_kernels=1), copy
