"""Who shares a node: groups inside and between nodes of unequal sizes, and work that each node needs once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from distlab.comm import RankError
from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Fault, Mutant

HOSTS = (("a", "a", "b", "b", "b"), ("b", "a", "b", "a", "c"), ("x", "x"), ("x",))


def _groups(fn: Callable[..., Any], hosts: list[str]) -> Any:
    """Return the groups of one job by kind, if there are two kinds."""
    found = fn(hosts)
    if isinstance(found, list | tuple) and len(found) == 2:
        return dict(zip(("the groups inside nodes", "the groups between nodes"), found, strict=True))
    return found


drive_places = Cases({f"ranks on {', '.join(hosts)}": (list(hosts),) for hosts in HOSTS}, _groups)


def budget_places(evidence: Evidence) -> list[str]:
    """Say how many jobs were asked."""
    return [f"{len(HOSTS)} jobs, {sum(map(len, HOSTS))} ranks"]


def _draw_hosts(draw: Draw) -> tuple[Any, ...]:
    names = ["n1", "n2", "n3", "a"][: draw.one_of(2, 3, 4, 1)]
    return ([names[draw.integer(0, len(names) - 1)] for _ in range(draw.integer(1, 9))],)


vary_places = Vary(_draw_hosts, num_calls=24)
_BETWEEN = "[[ranks[place] for ranks in inside if place < len(ranks)] for place in range(most)]"
WRONG_PLACES = (
    Mutant("equal blocks", "node in pieces", "nodes need not be equal: a node's ranks have its name in hosts", 1).edit(
        "inside = list(nodes.values())",
        "size, ranks = len(hosts) // len(nodes), list(range(len(hosts)))\n"
        "inside = [ranks[first : first + size] for first in range(0, len(hosts), size)]",
    ),
    Mutant("runs of one host", "neighbours", "a node that comes again later is the same node", 1)
    .setup("from itertools import groupby")
    .edit(
        "inside = list(nodes.values())",
        "inside = [list(run) for _, run in groupby(range(len(hosts)), key=lambda rank: hosts[rank])]",
    ),
    Mutant("shortest node counts", "rank missing", "count the places of the largest node, not of the smallest", 1).edit(
        "max(", "min("
    ),
    Mutant("leaders alone", "leaders alone", "these are the first ranks alone: each rank is in one group", 1).edit(
        "range(most)", "range(1)"
    ),
    Mutant("modulo", "modulo", "counting ranks by a step mixes nodes: go place by place in each node", 1).edit(
        _BETWEEN, "[list(range(place, len(hosts), most)) for place in range(most)]"
    ),
    Mutant("last rank leads", "last rank leads", "the first rank of a node leads it, not the last", 1).edit(
        "ranks[place] for", "ranks[-1 - place] for"
    ),
    Mutant("by name", "order of nodes", "nodes stand in the order of their first ranks, not of their names", 1).edit(
        "list(nodes.values())", "[nodes[host] for host in sorted(nodes)]"
    ),
    Mutant("turned", "turned round", "return first the groups inside nodes, then those between", 1).edit(
        f"return inside, {_BETWEEN}", f"return {_BETWEEN}, inside"
    ),
    Mutant("a view of the dict", "returned", "write list(...) around it", 1).edit(
        "list(nodes.values())", "nodes.values()"
    ),
    Mutant("last of each", "last of each", "a node keeps only its last rank: append to its list", 1).edit(
        "nodes.setdefault(host, []).append(rank)", "nodes[host] = [rank]"
    ),
    Mutant("everyone together", "not one node", "a group inside holds several nodes: each node has its own", 1).edit(
        "inside = list(nodes.values())", "inside = [list(range(len(hosts)))]"
    ),
    Mutant("anew", "anew", "ranks are numbered anew on each node: groups hold ranks of the whole job", 1).edit(
        "append(rank)", "append(len(nodes[host]))"
    ),
    Mutant("repeated", "repeated", "a node without such a rank gives its last again: no rank is there twice", 1).edit(
        "ranks[place] for ranks in inside if place < len(ranks)",
        "ranks[min(place, len(ranks) - 1)] for ranks in inside",
    ),
)


def drive_repair(fn: Callable[..., Any]) -> tuple[int, list[int]]:
    """Call it on nodes of two ranks; return this rank's node, and when it ended each piece of work."""
    node, local_rank = divmod(dist.get_rank(), 2)
    done: list[int] = []

    def work() -> None:
        time.sleep(0.01)
        done.append(time.monotonic_ns())

    fn(work, local_rank)
    return node, done


def judge_repair(evidence: Evidence) -> Iterator[Fault]:
    """Once on each node, and a collective behind it on every rank."""
    of_node: dict[int, list[int]] = {}
    for rank, (node, done) in enumerate(evidence.results):
        of_node.setdefault(node, []).extend([rank] * len(done))
    for node, workers in of_node.items():
        ranks = [rank for rank, (own, _) in enumerate(evidence.results) if own == node]
        if not workers:
            text = f"no rank did the work on node {node} (ranks {ranks}): a file that rank 0 writes to its own disk"
            yield Fault("node left out", f"{text} is not on other machines; the first rank of each node works")
        if len(workers) > 1:
            text = f"ranks {workers} did the work on node {node}"
            yield Fault("too often", f"{text}; once is enough, and two that write one file damage it")
        if workers != ranks[:1]:
            yield Fault("another rank", f"rank {workers[0]} did the work on node {node}; its first is {ranks[0]}")
    for rank, (_, done) in enumerate(evidence.results if evidence.world_size > 1 else ()):
        starts = [call.start_ns for call in calls(evidence, rank)]
        if not starts:
            yield Fault("no wait", f"rank {rank} waits for nobody: it may return before the work is done")
        if done and max(starts) < done[0]:
            text = f"rank {rank} meets the others before its work, not after it"
            yield Fault("waits too early", f"{text}: they go on while it still works")


def failure_repair(error: RankError, world_size: int) -> Fault | None:
    """Name a barrier that only some ranks call."""
    if "barrier" in str(error) and "raised" not in str(error).splitlines()[0]:
        text = f"on {world_size} ranks some wait in a barrier that others never call"
        return Fault("under if", f"{text}: take it out of the `if`, every rank calls it")
    return None


def budget_repair(evidence: Evidence) -> list[str]:
    """Say what it cost."""
    return [
        f"work on {-(-evidence.world_size // 2)} of {evidence.world_size} ranks, {evidence.records.num_calls()} calls"
    ]


def _draw_once(draw: Draw) -> tuple[Any, ...]:
    return (draw.rank % draw.one_of(1, 2, 3, draw.integer(2, 4)),)


def _use_once(fn: Callable[..., Any], local_rank: int) -> int:
    """Return how often this rank works."""
    done: list[int] = []
    fn(lambda: done.append(1), local_rank)
    return len(done)


vary_repair = Vary(_draw_once, _use_once, left_out={"sub-group": "all nodes of the job wait"})
_WORK = "if local_rank == 0:\n    work()"
WRONG_REPAIR = (
    Mutant("rank 0", "node left out", "no rank did the work on node 1", 3, 41).edit(
        "local_rank == 0", "dist.get_rank() == 0"
    ),
    Mutant("every rank", "too often", "damage it", 2).edit(_WORK, "work()"),
    Mutant("not the first", "another rank", "its first is 0", 4).edit("== 0", "== 1"),
    Mutant("all but the first", "another rank", "rank 1 did the work", 4).edit("== 0", "> 0"),
    Mutant("no barrier", "no wait", "may return before", 2).without("dist.barrier()"),
    Mutant("barrier first", "waits too early", "while it still works", 2).edit(
        f"{_WORK}\ndist.barrier()", f"dist.barrier()\n{_WORK}"
    ),
    Mutant("barrier under if", "under if", "take it out", 2, 5).edit(
        f"{_WORK}\ndist.barrier()", f"{_WORK}\n    dist.barrier()"
    ),
    Mutant("workers skip it", "under if", "every rank calls it", 2, 5).edit(
        f"{_WORK}\ndist.barrier()", f"{_WORK}\nelse:\n    dist.barrier()"
    ),
    Mutant("world size", "node left out", "first rank of each node", 4).edit(
        "local_rank == 0", "dist.get_rank() % dist.get_world_size() == 0"
    ),
)
