"""The process group that torch gets: one of shared memory, in which what leaves a node takes the time of a wire."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import distributed_c10d

from distlab.comm.nodes.wire import NodePlacement, Nodes, Pace, link_s, sleep_until
from distlab.comm.shared_memory.group import SharedGroup
from distlab.comm.shared_memory.meeting import Meeting


class NodeWire:
    """This rank's wire to other nodes, as one group uses it.

    Attributes:
        each: ranks in a node.
        num_nodes: nodes in which the group has ranks.
        pace: this rank's end of the wire, which all of its groups share.
    """

    def __init__(self, members: Sequence[int], rank: int, each: int, pace: Pace) -> None:
        self.each, self.pace = each, pace
        self._place = NodePlacement.of(members, rank, each)
        self.num_nodes = len(self._place.nodes)

    def collective(self, op: str, sent: int | Sequence[int], since_s: float) -> None:
        """Sleep until a collective that began at a moment is through: a ring over the nodes takes its time.

        The ranks of a node share an all_reduce and a reduce_scatter: each takes its part across. Of an all_to_all, only
        what goes to other nodes takes time.
        """
        num_ranks = self.num_nodes
        if isinstance(sent, int):
            num_bytes = self._place.part(op, sent)
        else:
            away = [number for number in range(len(sent)) if number not in self._place.mates]
            num_bytes, num_ranks, op = sum(sent[number] for number in away), len(away) + 1, "gather"  # of these bytes
        wire = self.pace.wire
        seconds = link_s(op, num_bytes, num_ranks, bytes_per_s=wire.bytes_per_s, latency_s=wire.latency_s)
        sleep_until(self.pace.occupy(seconds, since_s))

    def message(self, peer: int, num_bytes: int) -> tuple[float, float]:
        """Send a message now; return the moments when its sender is rid of it, and when it arrives; 0: at once."""
        if peer in self._place.mates:
            return 0.0, 0.0
        sent_s = self.pace.occupy(num_bytes / self.pace.wire.bytes_per_s, time.monotonic())
        return sent_s, sent_s + self.pace.wire.latency_s


def make(options: Any, nodes: Nodes | None) -> SharedGroup:
    """Make a group, as torch asks for one; the first, of all ranks, is told the nodes.

    Raises:
        ValueError: there is no group of all ranks that was told the nodes.
    """
    members, rank = list(options.global_ranks_in_group), options.group_rank
    if nodes is not None:
        members = list(range(options.group_size))
        chosen = Nodes.for_ranks(nodes, len(members))
        wire = NodeWire(members, rank, len(members) // chosen.count, Pace(chosen.wire))
    else:
        world = getattr(distributed_c10d._get_default_group(), "wire", None)
        if not isinstance(world, NodeWire):
            raise ValueError(
                "backend 'nodes' needs to know the nodes: init_process_group('nodes', pg_options=Nodes(2)), or "
                "run(..., nodes=2)"
            )
        wire = NodeWire(members, rank, world.each, world.pace)
    meeting = Meeting(options.store, rank, members, options.timeout.total_seconds())
    return SharedGroup(meeting, None if wire.num_nodes == 1 and nodes is None else wire)
