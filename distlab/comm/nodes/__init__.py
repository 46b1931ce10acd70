"""Nodes on one machine: what goes from one node to a different one takes the time of a wire.

    run(train, 8, nodes=2)                                     # two nodes of four ranks, 1GB/s,50us between them
    run(train, 8, nodes=Nodes(2, between="40MB/s,200us"))      # each rank has a wire of that speed to other nodes

It is a backend of torch.distributed, "nodes". All bytes move through shared memory, as on backend "shared". A call that
leaves a node is over when a wire of that speed would be through: collectives by the time of a ring over the nodes,
messages by their bytes behind those before. Every rank has a wire of its own, as each GPU of a large machine has a
network card of its own.

What is not as on real nodes: the ranks meet before each collective, which takes some 50 us and lets a call that does
not fit be named. All nodes share this machine's cores and memory: a wire faster than these is not reached.

Read `wire` (who sits where, and times) and `group` (what torch gets).
"""

from __future__ import annotations

from distlab.comm import shared_memory
from distlab.comm.nodes.wire import Nodes as Nodes

NAME = "nodes"


def register() -> None:
    """Let torch.distributed know the backend by its name; once more changes nothing.

    `init_process_group("nodes", pg_options=Nodes(2))` makes the group of all ranks, and says which nodes there are.
    """
    from distlab.comm.nodes.group import make

    shared_memory.register(NAME, make)
