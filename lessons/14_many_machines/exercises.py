"""Exercises of lesson 14; `checks/` says how each is driven and judged, and what wrong versions it must reject."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Many machines"
MINUTES = 85
NEEDS = ("01", "02", "10", "12")
AIMS = (
    "Start ranks on several machines with torchrun, Slurm or Kubernetes, and say what each variable is for.",
    "Say how agents meet, and what one sees when one is missing, late, lost, or looks in a different place.",
    "Find out which ranks share a machine, and make groups inside and between unequal nodes.",
    "Look at a cluster before a run: interfaces, versions, clocks, disks, by the name of the machine.",
)

_DIST = "import torch.distributed as dist"

EXERCISES = (
    Exercise(
        name="14.hosts",
        title="the hosts in a list of Slurm's",
        minutes=8,
        difficulty=2,
        source="solutions:hosts_of",
        imports=("import re",),
        hints=(
            "A comma ends a name only outside of brackets. What follows the brackets belongs to each name.",
            "re.findall with three groups: what stands before a bracket, what is in it, what follows it. Each part in "
            "the brackets is a number, or two with a dash between.",
            "For each (head, inside, tail): split inside at commas; partition each part at the dash; count from the "
            "first to the last, both included; str(number).zfill(len(first)). Nothing inside: head alone.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="14.slurm",
        title="from Slurm's variables to torch's",
        minutes=6,
        difficulty=1,
        source="solutions:torch_variables",
        hints=(
            "Four of the seven are a variable of Slurm's under a different name.",
            'SLURM_TASKS_PER_NODE: split at commas; "2(x3)" is three nodes of 2. Yours is number SLURM_NODEID.',
            'part.rstrip(")").partition("(x") gives the size and how often. MASTER_ADDR is hosts[0] on every task; '
            "MASTER_PORT is str(20000 + int(job) % 10000).",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="14.places",
        title="groups inside and between unequal nodes",
        minutes=8,
        difficulty=2,
        source="solutions:places",
        hints=(
            "Collect the ranks of each host in a dict: it keeps the order in which hosts came.",
            "A group between nodes takes the ranks at one place of their nodes: all first ones, all second ones, ...",
            "nodes.setdefault(host, []).append(rank). For each place up to the largest node: the rank at that place of "
            "every node that has that many ranks.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="14.rendezvous",
        title="agents meet in a store",
        minutes=12,
        difficulty=3,
        source="solutions:meet",
        imports=("import json", "from typing import Any"),
        hints=(
            'store.add("agents", 1) returns how many have come, this one included. Two never get the same number.',
            "Write down your ranks and your address under your number; then read those of all numbers. store.get waits "
            "for those who are not there yet. It returns bytes.",
            "Put the attempt into the name of every key. number = add - 1; too large: raise "
            "RuntimeError. set json of [local_ranks, address]; get those of 0 to num_agents - 1; add up the "
            "sizes before yours, and all.",
        ),
        worlds=(1, 3),
    ),
    Exercise(
        name="14.repair",
        title="spot the bug: the data are on one machine",
        minutes=4,
        difficulty=1,
        source="solutions:once_per_node",
        imports=("from collections.abc import Callable", _DIST),
        hints=(
            "On how many machines is rank 0?",
            "Each machine has its own /tmp. Which number says that a rank is the first one of its machine?",
            "local_rank == 0 instead of dist.get_rank() == 0; the barrier stays where it is.",
        ),
        worlds=(1, 2, 3, 4),
        broken="rank 0",
    ),
    Exercise(
        name="14.clocks",
        title="how far two clocks are apart",
        minutes=6,
        difficulty=2,
        source="solutions:clock_offset",
        hints=(
            "The other machine read its clock at some moment between your sending and your receiving.",
            "If both ways took equally long, it was midway. If not, it is off by half of the round trip at most: so "
            "take the round whose error can be least.",
            "min(rounds, key=...) by received - sent; (sent + received) / 2 - theirs, and (received - sent) / 2.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="14.preflight",
        title="in which facts the machines differ",
        minutes=9,
        difficulty=2,
        source="solutions:preflight",
        imports=("from typing import Any", _DIST),
        hints=(
            "dist.all_gather_object(list of world size, own facts) gives every rank the facts of all.",
            'Take the names of all ranks\' facts, without "host". one.get(name, "missing") is a rank\'s value.',
            "For each name: the set of values; more than one: for each value sorted({hosts of its ranks}).",
        ),
        worlds=(1, 3, 4),
    ),
)
