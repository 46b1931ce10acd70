"""Below which bandwidth does compression pay? Simulate a step with and without it, at several bandwidths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distlab.plan import Cluster, Link, Plan, Protocol, Workload
from distlab.plan.compression import Compression
from simulator.gradients.compression import MeasuredCodec
from simulator.hardware.rank_layout import COPIES, RankLayout
from simulator.step.simulate import Measured, simulate

SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S = 1e5, 1e15
BISECTIONS = 30  # of 33 doublings: the bandwidth to a millionth


def replica_link(cluster: Cluster, plan: Plan) -> Link:
    """Return the link that decides how fast replicas exchange: between nodes where any replicas are in several."""
    layout = RankLayout(cluster, plan)
    groups = [group for place in range(plan.pipeline) for group in layout.groups(COPIES, place)]
    return cluster.intra_node if all(group.is_in_one_node for group in groups) else cluster.inter_node


def with_bandwidth(cluster: Cluster, plan: Plan, bytes_per_s: float) -> Cluster:
    """Return the cluster with a different bandwidth, one way, on the link between replicas; latencies stay.

    A link of two protocols keeps their proportion: the faster one gets the bandwidth.

    Raises:
        ValueError: the bandwidth is not above zero.
    """
    if not (bytes_per_s > 0 and math.isfinite(bytes_per_s)):
        raise ValueError(f"bytes_per_s is {bytes_per_s!r}; pass a bandwidth above zero, such as 1.25e9 for 10 Gbit/s")
    link = replica_link(cluster, plan)
    scale = bytes_per_s / max(protocol.bytes_per_s for protocol in link.protocols)
    protocols = tuple(Protocol(p.latency_s, p.bytes_per_s * scale) for p in link.protocols)
    other = Link(link.name, protocols, f"{link.source} (bandwidth changed)".strip())
    intra, inter = (other if each is link else each for each in (cluster.intra_node, cluster.inter_node))
    return replace(cluster, intra_node=intra, inter_node=inter)


def break_even_bytes_per_s(
    workload: Workload, cluster: Cluster, plan: Plan, compression: Compression, *, codec: MeasuredCodec | None = None
) -> float:
    """Return the bandwidth between replicas below which compression makes the step shorter, by bisection.

    It is 0 where compression never pays, and infinite where it pays on any link of up to 1e15 bytes/s (its calls have
    less latency). Where several bandwidths are break-even, it is one of them.

    Error: the bandwidth is right to a millionth where one step overtakes the other but once.

    Raises:
        ValueError: as `simulate`.
    """
    compressed = replace(plan, compression=compression)
    plain = replace(plan, compression=None)

    def pays(bytes_per_s: float) -> bool:
        on = with_bandwidth(cluster, plan, bytes_per_s)
        return (
            simulate(workload, on, compressed, measured=Measured(codec)).duration_s
            < simulate(workload, on, plain).duration_s
        )

    low, high = SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S
    if pays(high):
        return math.inf
    if not pays(low):
        return 0.0
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class CompressionLine:
    """The step under one compression at each bandwidth, and where it stops paying."""

    compression: Compression
    duration_s: tuple[float, ...]
    break_even_bytes_per_s: float


@dataclass(frozen=True)
class CompressionSweep:
    """The step with and without compression at several bandwidths between replicas.

    Attributes:
        bytes_per_s: bandwidths, rising.
        plain_s: the step without compression at each.
        lines: the step with each compression.
        alone_s: the step without any communication: no compression makes it shorter.
    """

    bytes_per_s: tuple[float, ...]
    plain_s: tuple[float, ...]
    lines: tuple[CompressionLine, ...]
    alone_s: float


def bandwidths(low: float = 1e7, high: float = 1e11, count: int = 25) -> tuple[float, ...]:
    """Return bandwidths in bytes/s, evenly spread on a log scale."""
    return tuple(low * (high / low) ** (index / (count - 1)) for index in range(count))


def sweep_compression(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    *,
    compressions: Sequence[Compression],
    bytes_per_s: Sequence[float] | None = None,
) -> CompressionSweep:
    """Simulate the step with each compression, and without, at each bandwidth between replicas.

    Raises:
        ValueError: no compression or no bandwidth is given, the plan has one replica, or as `simulate`.
    """
    rising = tuple(sorted(set(bandwidths() if bytes_per_s is None else bytes_per_s)))
    if not compressions or not rising or plan.data == 1:
        raise ValueError(
            f"{len(compressions)} compressions, {len(rising)} bandwidths and {plan.data} replicas; pass at least one "
            "compression, one bandwidth and two replicas"
        )
    clusters = [with_bandwidth(cluster, plan, each) for each in rising]

    def durations(compression: Compression | None) -> tuple[float, ...]:
        chosen = replace(plan, compression=compression)
        return tuple(simulate(workload, each, chosen).duration_s for each in clusters)

    lines = []
    for each in compressions:
        stop = break_even_bytes_per_s(workload, cluster, plan, each)
        lines.append(CompressionLine(each, durations(each), stop))
    alone = simulate(workload, cluster, replace(plan, data=1, compression=None)).duration_s
    return CompressionSweep(rising, durations(None), tuple(lines), alone)
