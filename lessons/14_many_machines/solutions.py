"""Reference solutions of lesson 14: how ranks on several machines get their numbers, meet, and look at each other.

The library's versions are `distlab.comm.rendezvous` (variables and store), `distlab.comm.node_groups`,
`distlab.comm.clocks`; torchrun's own is `torch.distributed.elastic.rendezvous`.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def hosts_of(node_list: str) -> list[str]:
    """Return the names in a list of hosts as Slurm writes it, in its order.

    "node[01-03,07],login" is node01, node02, node03, node07, login. A range includes both of its ends, and its numbers
    have as many digits as its first. A name has at most one pair of brackets; letters may follow it: "rack[1-2]a".
    """
    hosts = []
    for head, inside, tail in re.findall(r"([^,\[\]]+)(?:\[([^\]]+)\])?([^,\[\]]*)", node_list):
        for part in inside.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else [""]
            hosts += [f"{head}{str(number).zfill(len(first))}{tail}" for number in numbers]
    return hosts


def torch_variables(slurm: dict[str, str], hosts: list[str]) -> dict[str, str]:
    """Return what torchrun would have set for this task of a Slurm job; every value is text.

    - RANK, LOCAL_RANK, WORLD_SIZE: from SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS;
    - GROUP_RANK, the number of the node: from SLURM_NODEID;
    - LOCAL_WORLD_SIZE: the tasks of this node, from SLURM_TASKS_PER_NODE, which lists the nodes in their order and
      counts repeats: "2(x3),1" is 2, 2, 2, 1;
    - MASTER_ADDR: the first of the hosts;
    - MASTER_PORT: 20000 plus the last four digits of SLURM_JOB_ID, so that two jobs on one node rarely collide.
    """
    sizes = []
    for part in slurm["SLURM_TASKS_PER_NODE"].split(","):
        size, _, repeats = part.rstrip(")").partition("(x")
        sizes += [size] * int(repeats or 1)
    return {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "GROUP_RANK": slurm["SLURM_NODEID"],
        "LOCAL_WORLD_SIZE": sizes[int(slurm["SLURM_NODEID"])],
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": str(20000 + int(slurm["SLURM_JOB_ID"]) % 10000),
    }


def places(hosts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups inside nodes and the groups between nodes; rank r runs on `hosts[r]`.

    Inside: the ranks of each node, ascending; nodes in the order of their first ranks. Between: the first ranks of all
    nodes (the leaders), then the second ranks of all nodes that have two, and so on. Nodes may have different numbers
    of ranks, and their ranks need not be neighbours.
    """
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    inside = list(nodes.values())
    most = max(len(ranks) for ranks in inside)
    return inside, [[ranks[place] for ranks in inside if place < len(ranks)] for place in range(most)]


def meet(store: Any, attempt: int, num_agents: int, local_ranks: int, address: str) -> tuple[int, int, int, str]:
    """Meet the other agents in a store; return this agent's number, its first rank, the world size, the master.

    Agents are numbered from 0 as they come, and ranks agent by agent. The master is the address of agent 0. An agent
    starts `local_ranks` ranks; each may start a different number. `store.get` waits for a key, and raises after a
    while.

    After a failure agents meet again in the same store, with the next attempt: nothing of the former one may count.

    Raises:
        RuntimeError: `num_agents` have met in this attempt already.
    """
    number = store.add(f"attempt {attempt}, agents", 1) - 1
    if number >= num_agents:
        raise RuntimeError(f"{num_agents} agents have met in attempt {attempt}; {address} comes too late")
    store.set(f"attempt {attempt}, agent {number}", json.dumps([local_ranks, address]))
    agents = [json.loads(store.get(f"attempt {attempt}, agent {other}")) for other in range(num_agents)]
    sizes = [size for size, _ in agents]
    return number, sum(sizes[:number]), sum(sizes), agents[0][1]


def clock_offset(rounds: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the seconds to add to the other machine's clock to get this one's, and how far off that may be at most.

    Each round is a message there and back: when this machine sent (its clock), when the other one answered (the other
    clock), when the answer was here (this clock). The quickest round counts.
    """
    sent, theirs, received = min(rounds, key=lambda one: one[2] - one[0])
    return (sent + received) / 2 - theirs, (received - sent) / 2


def preflight(facts: dict[str, str]) -> dict[str, dict[str, list[str]]]:
    """Return the facts in which ranks differ, the same on every rank; every rank gives its own facts.

    For each such fact: its values, and for each value the hosts that have it, in alphabetical order, each once. "host"
    says where a rank runs, and is not compared. A fact that a rank does not give has the value "missing" there.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    found = {}
    for name in {name for one in everyone for name in one if name != "host"}:
        values = {one.get(name, "missing") for one in everyone}
        if len(values) > 1:
            found[name] = {
                value: sorted({one["host"] for one in everyone if one.get(name, "missing") == value})
                for value in values
            }
    return found


def once_per_node(work: Callable[[], None], local_rank: int) -> None:
    """Do the work on one rank of each node; return on every rank only after it is done on all nodes."""
    if local_rank == 0:
        work()
    dist.barrier()
