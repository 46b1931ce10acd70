"""The process group that torch gets: one of shared memory within a node, or one that crosses nodes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from distlab.nodes.crossing import CrossingCollectives
from distlab.nodes.messages import CrossingMessages
from distlab.nodes.place import NodePlacement, Nodes
from distlab.nodes.sockets import Sockets
from distlab.nodes.wire import Pace
from distlab.shared_memory.collectives.collectives import Collectives
from distlab.shared_memory.group import SharedGroup, shared_group
from distlab.shared_memory.meeting import meet


class World(SharedGroup):
    """The group of all ranks, which knows the nodes; a rank's groups share its wire.

    Attributes:
        each: ranks in a node.
        pace: this rank's end of its wire to other nodes; None: there is no wire but the sockets.
    """

    each: int = 0
    pace: Pace | None = None


def make(options: Any, nodes: Nodes | None) -> SharedGroup:
    """Make a group, as torch asks for one; the first, of all ranks, is told the nodes.

    Raises:
        ValueError: there is no group of all ranks that was told the nodes.
    """
    members, rank = list(options.global_ranks_in_group), options.group_rank
    store, timeout_s = options.store, options.timeout.total_seconds()
    if nodes is not None:
        members = list(range(options.group_size))
        chosen = Nodes.for_ranks(nodes, len(members))
        each, pace = len(members) // chosen.count, Pace(chosen.between) if chosen.between else None
    else:
        world = distributed_c10d._get_default_group()
        if not isinstance(world, World):
            raise ValueError(
                "backend 'nodes' needs to know the nodes: init_process_group('nodes', pg_options=Nodes(2)), or "
                "run(..., nodes=2)"
            )
        each, pace = world.each, world.pace
    meeting = meet(store, rank, members, timeout_s)
    place = NodePlacement.of(members, rank, each)
    if len(place.nodes) == 1 and nodes is None:
        return shared_group(meeting)
    inside = None
    if len(place.mates) > 1:
        mates = [members[number] for number in place.mates]
        part = dist.PrefixStore(f"node{mates}", store)  # type: ignore[attr-defined]
        meeting.tied = meet(part, place.mates.index(rank), mates, timeout_s)
        inside = Collectives(meeting.tied)
    sockets = Sockets(store, rank, len(members), timeout_s, pace)
    group = (SharedGroup if nodes is None else World)(
        CrossingCollectives(meeting, inside, place, sockets),
        CrossingMessages(meeting, f"node-messages-{members}", place, sockets),
    )
    if isinstance(group, World):
        group.each, group.pace = each, pace
    return group
