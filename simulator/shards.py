"""Shards: what gathering, scattering and offloading cost in the groups of ranks that share one set of shards.

With `replicas` in the plan the ranks of a data-parallel group form several sets (hybrid sharding). Neighbouring ranks,
which share a node where they fit, hold one set: they gather and scatter. Ranks with the same shard in different sets
then sum what they hold of the gradients, 1/s of the bytes, over the slower links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from distlab.plan.records import Cluster, Link, Plan, Workload
from distlab.plan.sharding import DTYPE_BYTES
from simulator.cost import all_reduce_s, all_reduce_steps, message_s
from simulator.syncs import Group, Transfer
from simulator.units import to_ns

FAULT_BYTES = 6  # one for each code of a gradient: used, unused, sparse, twice, moved, not finite


class NumberBytes(NamedTuple):
    """Bytes of one number: of a parameter that is gathered, of a gradient that is summed over ranks."""

    parameter: int
    gradient: int


def number_bytes(workload: Workload, plan: Plan) -> NumberBytes:
    """Return what a parameter and a gradient take on the wire: the plan's precision, else the workload's bytes."""
    if plan.precision is None:
        return NumberBytes(workload.bytes_per_parameter, workload.bytes_per_parameter)
    return NumberBytes(DTYPE_BYTES[plan.precision.compute], DTYPE_BYTES[plan.precision.reduce])


@dataclass(frozen=True)
class Shards:
    """The data-parallel ranks of a stage: sets of `num_shards` neighbours, `replicas` of them.

    Attributes:
        cluster: where they are.
        first_rank: of the stage.
        num_shards: ranks that one set of shards is spread over.
        replicas: sets.
        links: a line of its own for a kind of call, and for its part on the computing rank, where one was measured.
    """

    cluster: Cluster
    first_rank: int
    num_shards: int
    replicas: int = 1
    links: Mapping[str, Link] = field(default_factory=dict)

    def padded(self, num_elements: int) -> int:
        """Return the elements of a flat buffer that is cut into equal shards."""
        return -(-num_elements // self.num_shards) * self.num_shards

    def gather(self, num_elements: int, bytes_each: int) -> Transfer:
        """Return the all-gather of a flat buffer.

        Cost: (s-1)/s of its bytes sent a rank, in s - 1 steps.
        """
        return self._in_a_set("all_gather", self.padded(num_elements) * bytes_each)

    def scatter(self, num_elements: int, bytes_each: int) -> tuple[Transfer, ...]:
        """Return the reduce-scatter of a flat buffer, and the all-reduce of the shard where there are replicas.

        Cost: (s-1)/s of its bytes sent a rank, and 2(r-1)/r of a shard's.
        """
        whole = self.padded(num_elements) * bytes_each
        own = self._in_a_set("reduce_scatter", whole)
        return (own,) if self.replicas == 1 else (own, self._across_sets(whole // self.num_shards))

    def on_rank_ns(self, part: str, num_elements: int, bytes_each: int) -> int:
        """Return what a part of a call ("all_gather start", "all_gather beside") costs the computing rank.

        Nothing unless it was measured: nccl's calls are kernels that add up on their way, and the host runs ahead.
        """
        link = self.links.get(part)
        if link is None or self.num_shards == 1 or not num_elements:
            return 0
        return to_ns(message_s(self.padded(num_elements) * bytes_each, link))

    def faults(self, num_tensors: int) -> Transfer:
        """Return the small all-reduce over all ranks that tells them what became of each tensor's gradient.

        Cost: FAULT_BYTES a tensor, summed by a ring.
        """
        num_ranks, num_bytes = self.num_shards * self.replicas, FAULT_BYTES * num_tensors
        group = Group(self._cluster("all_reduce"), self.first_rank, num_ranks)
        time_ns = group.exchange_ns("all_reduce", num_bytes)
        return Transfer("all_reduce", num_bytes, time_ns, group.sent_bytes("all_reduce", num_bytes))

    def host_copy(self, num_elements: int, bytes_each: int) -> Transfer:
        """Return the copy of a shard between a device and its host."""
        num_bytes = self.padded(num_elements) // self.num_shards * bytes_each
        return Transfer("copy", num_bytes, to_ns(num_bytes / self.cluster.device.host_link_bytes_per_s), 0.0)

    def _in_a_set(self, kind: str, num_bytes: int) -> Transfer:
        """Cost a ring in a set; of several sets the slowest counts, since all of them wait for one another."""
        cluster, per_node = self._cluster(kind), self.cluster.devices_per_node
        places = {(self.first_rank + index * self.num_shards) % per_node for index in range(self.replicas)}
        groups = [Group(cluster, place, self.num_shards) for place in places]
        share = num_bytes // self.num_shards if kind == "all_gather" else num_bytes
        times_ns = [group.exchange_ns(kind, share) for group in groups]
        return Transfer(kind, num_bytes, max(times_ns), groups[0].sent_bytes(kind, share))

    def _across_sets(self, shard_bytes: int) -> Transfer:
        """Cost the ring of the ranks that hold one shard; they are `num_shards` apart."""
        cluster, per_node = self._cluster("all_reduce"), self.cluster.devices_per_node
        last = self.first_rank + self.num_shards * self.replicas - 1
        crosses = self.first_rank // per_node != last // per_node
        links = [cluster.inter_node, cluster.intra_node][: 2 if crosses and self.num_shards < per_node else 1]
        chosen = links if crosses else [cluster.intra_node]
        seconds = max(all_reduce_s(shard_bytes, self.replicas, link) for link in chosen)
        sent = all_reduce_steps(self.replicas).bytes_factor * shard_bytes
        return Transfer("all_reduce", shard_bytes, to_ns(seconds), sent)

    def _cluster(self, kind: str) -> Cluster:
        link = self.links.get(kind)
        return self.cluster if link is None else replace(self.cluster, intra_node=link, inter_node=link)


def shards_of(cluster: Cluster, plan: Plan, stage: int = 0, links: Mapping[str, Link] | None = None) -> Shards:
    """Return the sets of shards of a pipeline stage's ranks."""
    num_shards = plan.sharding.num_shards(plan.data)
    return Shards(cluster, stage * plan.data, num_shards, plan.sharding.replicas, links or {})
