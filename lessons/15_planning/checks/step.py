"""Where the seconds of a step go: compute, tensor's calls, the bubble, exposed gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from distlab.course.grading.cases import Cases
from distlab.grading import Evidence, Mutant
from distlab.plan import Cluster, Device, Link, Plan, Protocol

INSIDE, BETWEEN = (Link(name, (Protocol(1e-6, rate),)) for name, rate in (("inside", 300e9), ("between", 20e9)))
MACHINE = Cluster("nodes of 4", Device("a GPU", 400e12, 2e12, 80e9), 64, 4, INSIDE, BETWEEN)
SIZES = (2e9, 24, 2048, 1024)  # parameters, layers, hidden, sequence


class Case(NamedTuple):
    """A plan, and what it is about."""

    words: str
    plan: Plan
    cluster: Cluster = MACHINE


CASES = (
    Case("one GPU", Plan()),
    Case("one GPU, 3 micro-batches", Plan(num_microbatches=3)),
    Case("full recompute", Plan(recompute="full")),
    Case("data 2, in a node", Plan(data=2)),
    Case("data 8, over two nodes", Plan(data=8)),
    Case("data 8, 4 micro-batches", Plan(data=8, num_microbatches=4)),
    Case("tensor 4, in a node", Plan(tensor=4)),
    Case("tensor 8, over two nodes", Plan(tensor=8)),
    Case("tensor 4, full recompute, 2 micro-batches", Plan(tensor=4, recompute="full", num_microbatches=2)),
    Case("pipeline 4, 8 micro-batches", Plan(pipeline=4, num_microbatches=8)),
    Case("data 2, tensor 4: each node a replica", Plan(data=2, tensor=4)),
    Case("data 4, tensor 2, pipeline 3, 6 micro-batches", Plan(4, 3, 6, tensor=2)),
    Case("data 2, tensor 2, pipeline 2: a stage on each node", Plan(2, 2, tensor=2)),
    Case("data 4, tensor 2, nodes of 8", Plan(4, tensor=2), replace(MACHINE, devices_per_node=8)),
)


drive_step = Cases({case.words: (*SIZES, case.plan, case.cluster) for case in CASES})


def budget_step(evidence: Evidence) -> list[str]:
    """Say what was asked."""
    seconds = [sum(made["result"].values()) for made in evidence.results[0].values()]
    return [f"{len(CASES)} plans, from {min(seconds):.3g} to {max(seconds):.3g} s"]


_ONE = "(8 if is_full else 6) * parameters * sequence / (t * p)"
WRONG_STEP = (
    Mutant(
        "forward alone", "forward alone", "2 operations per parameter and token are forward; backward has 4 more", 1
    ).edit("(8 if is_full else 6)", "2"),
    Mutant(
        "no recompute", "recompute ignored", "full recompute runs forward once more: 8 operations, not 6, and calls", 1
    ).edit('plan.recompute == "full"', "False"),
    Mutant(
        "each rank all of it", "not shared", "tensor and pipeline ranks share the operations: divide by both degrees", 1
    ).edit(_ONE, _ONE.removesuffix(" / (t * p)")),
    Mutant("data ranks share", "data shares", "each data rank has its own micro-batch: divide by t x p alone", 1).edit(
        _ONE, _ONE.replace("t * p", "t * p * d")
    ),
    Mutant(
        "one call a step", "calls once", "tensor ranks talk in each micro-batch: times plan.num_microbatches", 1
    ).edit("m * sent", "sent"),
    Mutant(
        "calls not made again", "calls not repeated", "full recompute repeats forward's calls: 12 activations, not 8", 1
    ).edit("(12 if is_full else 8)", "8"),
    Mutant("one wire", "always between", "a group inside a node uses intra_node", 1, "common calculator").edit(
        "cluster.intra_node if reach <= cluster.devices_per_node else cluster.inter_node", "cluster.inter_node"
    ),
    Mutant(
        "NVLink everywhere",
        "always inside",
        "a group that is larger than a node reaches other nodes: its wire is inter_node",
        1,
        "common calculator",
    ).edit("cluster.intra_node if reach <= cluster.devices_per_node else cluster.inter_node", "cluster.intra_node"),
    Mutant(
        "data next to each other",
        "next to each other",
        "a data group reaches over tensor x data GPUs, not data alone",
        1,
    ).edit("rate(t * d)", "rate(d)"),
    Mutant(
        "half a ring", "one way", "a ring all-reduce sends 2 (d - 1) / d: a reduce-scatter and an all-gather", 1
    ).edit("2 * (d - 1)", "(d - 1)"),
    Mutant(
        "nothing overlaps",
        "nothing hides",
        "backward of the last micro-batch hides gradients: subtract two thirds of its compute",
        1,
        "popular claim",
    ).without(" - 2 / 3 * one"),
    Mutant(
        "all backward overlaps", "all backward hides", "gradients leave in the last micro-batch: others hide nothing", 1
    ).edit("2 / 3 * one", "2 / 3 * one * m"),
    Mutant("time won", "negative", "what is hidden altogether takes no time: max(0, ...)", 1).edit(
        "max(0.0, gradients - 2 / 3 * one)", "gradients - 2 / 3 * one"
    ),
    Mutant(
        "bubble without calls", "bubble computes", "a waiting stage waits for tensor calls too: (p - 1) of both", 1
    ).edit("(one + sent)", "one"),
    Mutant(
        "a share for seconds", "bubble over m", "in seconds the bubble is p - 1 micro-batches; / m is its share", 1
    ).edit("(one + sent)", "(one + sent) / m"),
    Mutant("elements", "elements", "an element of an activation or a gradient has 2 bytes", 1)
    .edit("* 2 * sequence", "* sequence")
    .edit("* 2 * parameters", "* parameters"),
    Mutant("one of them", "one micro-batch", "a step has plan.num_microbatches of them", 1)
    .edit("m * one", "one")
    .edit("m * sent", "sent"),
    Mutant(
        "half of the calls", "forward's calls", "backward makes as many calls as forward: 8 activations, not 4", 1
    ).edit("else 8)", "else 4)"),
    Mutant(
        "calls of all layers", "all layers", "a stage makes its own layers' calls: divide by the pipeline degree", 1
    ).edit("layers / p /", "layers /"),
    Mutant(
        "twice the buffer", "whole buffer", "a ring sends 2 (d - 1) / d of the bytes, and not twice all of them", 1
    ).edit("2 * (d - 1) / d *", "2 * (d > 1) *"),
    Mutant("all gradients", "whole gradients", "a rank has gradients of its own parameters: divide by t x p", 1).edit(
        "2 * parameters / (t * p) / rate", "2 * parameters / rate"
    ),
    Mutant(
        "forward hides too", "the whole pass hides", "gradients exist from backward on: forward hides nothing", 1
    ).edit("2 / 3 * one", "one"),
    Mutant(
        "sent each time", "each micro-batch", "gradients are sent once per step, after the last micro-batch", 1
    ).edit("max(0.0, ", "m * max(0.0, "),
    Mutant(
        "a stage too many", "bubble of p", "it counts p stages in the bubble; the first micro-batch waits for p - 1", 1
    ).edit("(p - 1) *", "(p if p > 1 else 0) *"),
    Mutant("t x d x p", "t x d x p", "a data group reaches over t x d GPUs: stages lie further apart", 1).edit(
        "rate(t * d)", "rate(t * d * p)"
    ),
    Mutant("own part", "own part", "a rank sends (t - 1) / t of an activation: its own part stays", 1).edit(
        "* (t - 1) / t *", "* (t > 1) *"
    ),
    Mutant("bits", "bits", "bytes_per_s are bytes: it counts bits", 1).edit(".bytes_per_s", ".bytes_per_s / 8"),
    Mutant("share", "share", "the bubble is p - 1 micro-batches on a stage, not a share of the others", 1).edit(
        '"bubble": (p - 1) *', '"bubble": (p - 1) / (m + p - 1) * m *'
    ),
)
