"""Nodes on one machine: ranks of a node meet in shared memory, and ranks of different nodes through sockets.

    run(train, 8, nodes=2)                                     # two nodes of four ranks, loopback sockets between them
    run(train, 8, nodes=Nodes(2, between="40MB/s,200us"))      # each rank has a wire of that speed to other nodes

It is a backend of torch.distributed, "nodes". A group within a node is one of backend "shared". A group that crosses
nodes moves its data between them with gloo, over sockets, and inside them through memory. A wire slows down all that
goes to other nodes: collectives by the time of a ring on it, messages by their bytes behind those before. Every rank
has a wire of its own, as each GPU of a large machine has a network card of its own.

What is not as on real nodes: the ranks agree on each collective call through memory before the data move, which takes
some 50 us and lets a call that does not fit be named. All nodes share this machine's cores.

Read `place` (who sits where), `wire` (times), `sockets` (bytes to other nodes), `crossing` (collectives), `messages`,
and `group` (what torch gets).
"""

from __future__ import annotations

from distlab.nodes.place import Nodes as Nodes

NAME = "nodes"


def register() -> None:
    """Let torch.distributed know the backend by its name; once more changes nothing.

    `init_process_group("nodes", pg_options=Nodes(2))` makes the group of all ranks, and says which nodes there are.
    """
    import torch.distributed as dist

    from distlab.nodes.group import make

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu"])
