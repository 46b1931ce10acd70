"""How long work takes on a device, and a message or a collective on a link.

The alpha-beta model: one message of S bytes takes `latency + S / bandwidth`. A collective is a number of steps, each
with its latency, and a number of bytes that every rank must push through its link:

    ring all-reduce          2(n-1) alpha + 2(n-1)/n S/beta     least bytes; steps grow with n
    halving-doubling         2 log2(n) alpha + 2(n-1)/n S/beta  least bytes and few steps; wants a power of two
    double binary tree       2 log2(n) alpha + 2 S/beta         few steps; pipelined, both trees busy
    in network               2 alpha + (n+1)/n S/beta           the switch adds up

Links may have several protocols, from one with a low latency to one with a high bandwidth. A library picks one for the
whole collective, by its size: the time is the smallest of the lines that it uses for that size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from distlab.plan import Cluster, Device, Link, Protocol, Work
from distlab.plan.require import chosen

ALL_REDUCE_ALGORITHMS = ("ring", "halving_doubling", "tree", "in_network")
LEAST_IN_SWITCH = 5  # ranks from which nccl lets NVLink 4's switch add up: stas00/ml-engineering@744d01e1, 2025


class Steps(NamedTuple):
    """A collective in the alpha-beta model.

    Attributes:
        num_latencies: messages that follow one another.
        bytes_factor: bytes that a rank's link carries one way, as a multiple of the message's size.
        idle_factor: bytes that it would carry in one more step of a ring (see `Link.idle_steps`), as such a multiple.
    """

    num_latencies: float
    bytes_factor: float
    idle_factor: float = 0.0


class Sent(NamedTuple):
    """Parts of the rows that experts need which are sent: once to each rank that has some, and once to each node."""

    to_ranks: float
    to_nodes: float


def compute_s(work: Work, device: Device, more_launches: int = 0) -> float:
    """Return the time of work on a device: matrix products, then all other kernels, and a fixed time per kernel.

    The parts are added, not the longest taken: `Work` already puts each kernel on the side of the roofline that bounds
    it, and the kernels of one stream follow one another.
    A device cannot start a kernel before its host has launched it: work of many small kernels takes as long as their
    launches. There may be more of them than kernels are counted, or fewer.
    """
    return max(busy_s(work, device), (work.num_kernels + more_launches) * device.launch_s)


def busy_s(work: Work, device: Device) -> float:
    """Return the time of work on a device whose host runs ahead."""
    seconds = (
        work.matmul_flops / device.matmul_flops_per_s
        + work.memory_bytes / device.memory_bytes_per_s
        + work.num_kernels * device.kernel_s
    )
    if work.attention_flops:
        seconds += work.attention_flops / (device.attention_flops_per_s or device.matmul_flops_per_s)
    return seconds


def host_seconds_per_byte(cluster: Cluster, num_ranks: int) -> float:
    """Return what a byte of an update takes on the host: of its memory, which a node's ranks share, or of a thread."""
    shared = min(num_ranks, cluster.devices_per_node) / cluster.device.host_memory_bytes_per_s
    return max(shared, 1 / (cluster.software.host_thread_bytes_per_s or math.inf))


def steps_s(num_bytes: float, steps: Steps, link: Link) -> float:
    """Return the time of a collective on a link: its start, a number of latencies, and bytes over bandwidth.

    A ring works in rounds. In a round each rank's wire carries 2(n-1) chunks, and for `link.idle_steps` steps nothing:
    the first chunk is read and the last one copied meanwhile. So rings of few ranks reach less of the wire.

    Raises:
        ValueError: the size is negative, infinite or not a number.
    """
    start_s = link.start_s if steps.num_latencies else 0.0
    if link.idle_steps:
        steps = Steps(steps.num_latencies, steps.bytes_factor + link.idle_steps * steps.idle_factor)
    return start_s + _fastest_s(num_bytes, steps, link.protocols)


def _fastest_s(num_bytes: float, steps: Steps, protocols: Sequence[Protocol]) -> float:
    if not (num_bytes >= 0 and math.isfinite(num_bytes)):
        raise ValueError(f"a message has {num_bytes!r} bytes; pass a finite number >= 0")
    return min(
        steps.num_latencies * protocol.latency_s + steps.bytes_factor * num_bytes / protocol.bytes_per_s
        for protocol in protocols
        if num_bytes <= protocol.most_bytes
    )


def message_s(num_bytes: float, link: Link) -> float:
    """Return the time of one message from one rank to another."""
    return _fastest_s(num_bytes, Steps(1, 1.0), link.protocols)


@lru_cache(maxsize=256, typed=True)
def all_reduce_steps(num_ranks: int, algorithm: str = "ring") -> Steps:
    """Return the steps of an all-reduce among n ranks.

    Cost: see the table of this file. Where the number of ranks is not a power of two, halving-doubling exchanges the
    whole message once more before and after; the tree has a level that is not full.
    Source: Thakur, Rabenseifner, Gropp, IJHPCA 2005 (ring, halving-doubling); Sanders, Speck, Traeff 2009 (double
        binary tree); NVIDIA, Hot Chips 34, 2022 (in the switch: n + 1 parts of S/n each way instead of 2(n-1)).

    Raises:
        ValueError: the algorithm is unknown, or n is less than 1.
    """
    n = _check_ranks(num_ranks)
    chosen("all-reduce algorithm", algorithm, ALL_REDUCE_ALGORITHMS)
    if n == 1:
        return Steps(0, 0.0)
    if algorithm == "ring":
        return Steps(2 * (n - 1), 2 * (n - 1) / n, 1 / n)
    if algorithm == "tree":
        return Steps(2 * math.ceil(math.log2(n)), 2.0)
    if algorithm == "in_network":
        return Steps(2, (n + 1) / n)
    core = 2 ** int(math.log2(n))
    extra = 0 if core == n else 1
    return Steps(2 * math.log2(core) + 2 * extra, 2 * (core - 1) / core + 2 * extra)


@lru_cache(maxsize=256, typed=True)
def reduce_scatter_steps(num_ranks: int) -> Steps:
    """Return the steps of a ring reduce-scatter, and of a ring all-gather: half of a ring all-reduce."""
    n = _check_ranks(num_ranks)
    return Steps(n - 1, (n - 1) / n, 0.5 / n if n > 1 else 0.0)


def all_reduce_s(num_bytes: float, num_ranks: int, link: Link, algorithm: str = "ring") -> float:
    """Return the time of an all-reduce of num_bytes on each of num_ranks ranks.

    Raises:
        ValueError: the size is negative, the number of ranks less than 1, or the algorithm unknown.
    """
    steps = all_reduce_steps(num_ranks, algorithm)
    if algorithm == "in_network" and link.switch and num_ranks > 1:
        return link.start_s + _fastest_s(num_bytes, steps, link.switch)
    return steps_s(num_bytes, steps, link)


def library_all_reduce_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the time of an all-reduce as a library runs it: a ring, or in the switch where that is faster.

    Libraries let a switch add up from LEAST_IN_SWITCH ranks on.
    """
    algorithms = ("ring", "in_network") if link.switch and num_ranks >= LEAST_IN_SWITCH else ("ring",)
    return min(all_reduce_s(num_bytes, num_ranks, link, algorithm) for algorithm in algorithms)


def reduce_scatter_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the time of a ring reduce-scatter of num_bytes on each rank (each rank keeps 1/n of the sum)."""
    return steps_s(num_bytes, reduce_scatter_steps(num_ranks), link)


def all_gather_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the time of a ring all-gather that leaves num_bytes, the whole, on each rank."""
    return reduce_scatter_s(num_bytes, num_ranks, link)


def hierarchical_all_reduce_s(
    num_bytes: float, ranks_per_node: int, num_nodes: int, *, intra_node: Link, inter_node: Link
) -> float:
    """Return the time of reduce-scatter inside nodes, all-reduce across them on S/g, all-gather inside.

    The three stages follow one another; each rank of a node has its own wire (`inter_node`) to other nodes. Where that
    is pipelined, the first chunk goes through all stages, and the others through the slower ones behind it.
    """

    def parts(size: float) -> tuple[float, float]:
        return 2 * reduce_scatter_s(size, ranks_per_node, intra_node), all_reduce_s(
            size / ranks_per_node, num_nodes, inter_node
        )

    inside, across = parts(num_bytes)
    return max(inside, across) + min(parts(0.0)) if inter_node.pipelined else inside + across


def ring_over_nodes_s(
    num_bytes: float, ranks_per_node: int, num_nodes: int, *, intra_node: Link, inter_node: Link
) -> float:
    """Return the time of one ring of all ranks that leaves num_bytes, the whole, on each: nccl's all-gather over nodes.

    Every message waits for the one before it, so that latencies grow with the ranks. Messages on both wires travel at
    once; each rank of a node sends on a wire of its own, 1/g of the bytes.

    Cost: n - 1 messages, of which one less than the nodes are between nodes; the slower wire's time for its bytes.
    Source: NVIDIA, nccl src/graph/tuning.cc (ring: steps inside and between nodes, each with its latency).
    """
    n = _check_ranks(ranks_per_node) * _check_ranks(num_nodes)
    across = num_nodes - 1
    inside, part = n - 1 - across, (n - 1) / n
    between_s = [
        (across * each.latency_s, part * num_bytes / ranks_per_node / each.bytes_per_s)
        for each in inter_node.protocols
        if num_bytes <= each.most_bytes
    ]
    if ranks_per_node == 1:
        return inter_node.start_s * (n > 1) + min(map(sum, between_s))
    return intra_node.start_s + min(
        inside * each.latency_s + latency_s + max(part * num_bytes / each.bytes_per_s, wire_s)
        for each in intra_node.protocols
        if num_bytes <= each.most_bytes
        for latency_s, wire_s in between_s
    )


def all_to_all_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the time of an all-to-all of num_bytes on each rank, of which 1/n goes to each: (n-1)/n S leave it.

    Cost: n - 1 messages of S/n, one after the other.
    """
    return reduce_scatter_s(num_bytes, num_ranks, link)


def hierarchical_all_to_all_s(
    num_bytes: float, ranks_per_node: int, num_nodes: int, *, intra_node: Link, inter_node: Link
) -> float:
    """Return the time of an all-to-all over nodes: messages inside and between nodes travel at once, on two wires."""
    n = _check_ranks(ranks_per_node) * _check_ranks(num_nodes)
    inside, across = ranks_per_node - 1, n - ranks_per_node
    in_node, between = Steps(inside, inside / n), Steps(across, across / n)
    return max(steps_s(num_bytes, in_node, intra_node), steps_s(num_bytes, between, inter_node))


def dispatch_s(
    num_bytes: float, ranks_per_node: int, num_nodes: int, *, intra_node: Link, inter_node: Link, sent: Sent
) -> float:
    """Return the time in which one kernel brings rows to the ranks of their experts, or back: on two wires at once.

    Rows for a different node go to the rank of the sender's own place there, which hands them on inside.

    Source: deepseek-ai/DeepEP, README.md and csrc/kernels, 2025.
    """
    n = _check_ranks(ranks_per_node) * _check_ranks(num_nodes)
    here, others = (ranks_per_node - 1) / ranks_per_node, (num_nodes - 1) / num_nodes
    in_node = Steps(1 + (num_nodes > 1), here * sent.to_ranks) if ranks_per_node > 1 else Steps(0, 0.0)
    between = Steps(1, others * sent.to_nodes) if num_nodes > 1 else Steps(0, 0.0)
    return max(steps_s(num_bytes, in_node, intra_node), steps_s(num_bytes, between, inter_node)) if n > 1 else 0.0


def bus_bytes_per_s(num_bytes: float, seconds: float, num_ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce as nccl-tests prints it: 2(n-1)/n S / time."""
    return all_reduce_steps(num_ranks).bytes_factor * num_bytes / seconds


def _check_ranks(num_ranks: int) -> int:
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise ValueError(f"a collective runs among {num_ranks!r} ranks; pass a whole number of at least 1")
    return num_ranks
