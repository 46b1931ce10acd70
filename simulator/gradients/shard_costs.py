"""What gathering, scattering and offloading cost in the groups of ranks that share one set of shards.

Ranks with equal copies of the parameters share them out: replicas, and ranks that split the positions. With `replicas`
in the plan these ranks form several sets (hybrid sharding). Neighbouring ranks, which share a node where they fit, hold
one set: they gather and scatter. Ranks with the same shard in different sets then sum their gradients of it, 1/s of the
bytes, over the slower links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from distlab.plan import Cluster
from simulator.gradients.buckets import Transfer
from simulator.hardware.cost import all_reduce_s, all_reduce_steps, message_s
from simulator.hardware.process_groups import Group, Links, group_of
from simulator.hardware.rank_layout import COPIES, RankLayout
from simulator.units import to_ns

Rows = tuple[tuple[int, ...], ...]
FAULT_BYTES = 6  # one for each code of a gradient: used, unused, sparse, twice, moved, not finite


@dataclass(frozen=True)
class Shards:
    """The ranks of a stage with equal copies: sets of `num_shards`, `replicas` of them.

    Attributes:
        cluster: where they are.
        copies: groups of ranks with equal copies, those that sit alike in their nodes once.
        num_shards: ranks that one set of shards is spread over.
        replicas: sets.
        links: the measured link of a kind of call, and of its part on the computing rank, where there is one.
    """

    cluster: Cluster
    copies: Rows
    num_shards: int
    replicas: int = 1
    links: Links = field(default_factory=dict)

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

    def starting_ns(self, kind: str, num_elements: int, bytes_each: int) -> int:
        """Return what a call costs the computing rank, which pays when it starts the call.

        Nothing unless it was measured ("all_gather start"): nccl's calls are kernels, and the host runs ahead.
        """
        link = self.links.get(f"{kind} start")
        if link is None or self.num_shards == 1 or not num_elements:
            return 0
        return to_ns(message_s(self.padded(num_elements) * bytes_each, link))

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
        """Cost a ring in a set; of several sets the slowest counts, since all of them wait for one another."""
        groups = self._groups(self._sets)
        share = num_bytes // self.num_shards if kind == "all_gather" else num_bytes
        times_ns = [group.exchange_ns(kind, share) for group in groups]
        return Transfer(kind, num_bytes, max(times_ns), groups[0].sent_bytes(kind, share))

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
