"""Where the seconds of a step go: compute, tensor's calls, the bubble, exposed gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from distlab_lesson_15.checks.shared import judge_slips

from distlab.grading import Evidence, Fault, Mutant
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
    Case("data 4, tensor 2, nodes of 8", Plan(4, tensor=2), replace(MACHINE, devices_per_node=8)),
)


def drive_step(fn: Callable[..., Any]) -> list[Any]:
    """Ask for every plan."""
    return [fn(*SIZES, case.plan, case.cluster) for case in CASES]


def parts_of(case: Case, slip: str = "") -> dict[str, float]:
    """Return the parts of a step, or what a slip makes of them."""
    parameters, layers, hidden, sequence = SIZES
    plan, machine = case.plan, case.cluster
    t, p, d, m = plan.tensor, plan.pipeline, plan.data, plan.num_microbatches
    full = plan.recompute == "full" and slip != "recompute ignored"

    def rate(reach: int) -> float:
        inside = reach <= machine.devices_per_node and slip != "always between" or slip == "always inside"
        return (machine.intra_node if inside else machine.inter_node).protocols[-1].bytes_per_s

    operations = 2 if slip == "forward alone" else 8 if full else 6
    ranks = {"not shared": 1, "data shares": t * p * d}.get(slip, t * p)
    one = operations * parameters * sequence / ranks / machine.device.matmul_flops_per_s
    times = 4 if slip == "forward's calls" else 12 if full and slip != "calls not repeated" else 8
    width = 1 if slip == "elements" else 2
    sent = times * (t - 1) / t * width * sequence * hidden * layers / rate(t)
    sent = sent if slip == "all layers" else sent / p
    ring = {"one way": 1, "whole buffer": 2 * d / max(d - 1, 1)}.get(slip, 2) * (d - 1) / d
    own = parameters if slip == "whole gradients" else parameters / (t * p)
    gradients = ring * width * own / rate({"next to each other": d}.get(slip, t * d))
    hidden_s = {"nothing hides": 0.0, "all backward hides": 2 / 3 * one * m, "the whole pass hides": one}
    data = gradients - hidden_s.get(slip, 2 / 3 * one)
    waits = {"bubble computes": one, "bubble of p": (one + sent) * p / max(p - 1, 1)}.get(slip, one + sent)
    return {
        "compute": one if slip == "one micro-batch" else m * one,
        "tensor": sent if slip in ("one micro-batch", "calls once") else m * sent,
        "bubble": (p - 1) * (waits / m if slip == "bubble over m" else waits),
        "data": data if slip == "negative" else max(0.0, data * (m if slip == "each micro-batch" else 1)),
    }


SLIPS = {
    "forward alone": "2 operations per parameter and token are forward; backward has 4 more",
    "recompute ignored": "Full recompute runs forward once more: 8 operations in place of 6, and its calls too",
    "not shared": "Tensor and pipeline ranks share the operations: divide by both degrees",
    "data shares": "Data ranks do not share a micro-batch: each has its own, so divide by tensor x pipeline alone",
    "one micro-batch": "A step has plan.num_microbatches of them",
    "calls once": "Tensor ranks talk in each micro-batch: times plan.num_microbatches",
    "forward's calls": "Backward makes as many tensor calls as forward: 8 activations, not 4",
    "calls not repeated": "With full recompute the calls of forward are made again: 12 activations, not 8",
    "elements": "An element of an activation or a gradient has 2 bytes",
    "all layers": "A stage makes the calls of its own layers: divide by the pipeline degree",
    "always inside": "A group that is larger than a node reaches other nodes: its wire is inter_node",
    "always between": "A group inside a node uses intra_node",
    "next to each other": "Tensor ranks stand between data ranks: a data group reaches over tensor x data GPUs",
    "one way": "A ring all-reduce sends 2 (d - 1) / d of the bytes: a reduce-scatter and an all-gather",
    "whole buffer": "A ring sends 2 (d - 1) / d of the bytes, not twice all of them: one rank alone sends nothing",
    "whole gradients": "A rank has the gradients of its own parameters: divide by tensor x pipeline",
    "nothing hides": "Backward of the last micro-batch hides gradients: take away two thirds of its compute",
    "all backward hides": "Gradients leave in the last micro-batch alone: the others' backward hides nothing",
    "the whole pass hides": "Gradients exist from backward on: forward, a third of the compute, hides nothing",
    "negative": "What is hidden altogether takes no time: max(0, ...)",
    "each micro-batch": "Gradients are sent once per step, after the last micro-batch",
    "bubble computes": "A stage that waits, waits for tensor calls too: p - 1 times compute and tensor",
    "bubble of p": "The last stage waits for p - 1 stages before it, not for p",
    "bubble over m": "(p - 1) / m is the bubble's share of the computing time; in seconds it is p - 1 micro-batches",
}


def judge_step(evidence: Evidence) -> Iterator[Fault]:
    """Compare every plan's parts."""
    yield from judge_slips(evidence, CASES, parts_of, SLIPS)


def budget_step(evidence: Evidence) -> list[str]:
    """Say what was asked."""
    slowest = max(sum(parts.values()) for parts in evidence.results[0])
    return [f"{len(CASES)} plans, from {min(sum(p.values()) for p in evidence.results[0]):.3g} to {slowest:.3g} s"]


_ONE = "(8 if is_full else 6) * parameters * sequence / (t * p)"
WRONG_STEPS = (
    Mutant("forward alone", "forward alone", "4 more", 1).edit("(8 if is_full else 6)", "2"),
    Mutant("no recompute", "recompute ignored", "once more", 1).edit('plan.recompute == "full"', "False"),
    Mutant("each rank all of it", "not shared", "divide by both", 1).edit(_ONE, _ONE.removesuffix(" / (t * p)")),
    Mutant("data ranks share", "data shares", "has its own", 1).edit(_ONE, _ONE.replace("t * p", "t * p * d")),
    Mutant("one call a step", "calls once", "in each micro-batch", 1).edit("m * sent", "sent"),
    Mutant("calls not made again", "calls not repeated", "made again", 1).edit("(12 if is_full else 8)", "8"),
    Mutant("one wire", "always between", "uses intra_node", 1, "common calculator").edit(
        "cluster.intra_node if reach <= cluster.devices_per_node else cluster.inter_node", "cluster.inter_node"
    ),
    Mutant("NVLink everywhere", "always inside", "its wire is inter_node", 1, "common calculator").edit(
        "cluster.intra_node if reach <= cluster.devices_per_node else cluster.inter_node", "cluster.intra_node"
    ),
    Mutant("data next to each other", "next to each other", "tensor x data", 1).edit("rate(t * d)", "rate(d)"),
    Mutant("half a ring", "one way", "and an all-gather", 1).edit("2 * (d - 1)", "(d - 1)"),
    Mutant("nothing overlaps", "nothing hides", "two thirds", 1, "popular claim").without(" - 2 / 3 * one"),
    Mutant("all backward overlaps", "all backward hides", "in the last micro-batch alone", 1).edit(
        "2 / 3 * one", "2 / 3 * one * m"
    ),
    Mutant("time won", "negative", "takes no time", 1).edit(
        "max(0.0, gradients - 2 / 3 * one)", "gradients - 2 / 3 * one"
    ),
    Mutant("bubble without calls", "bubble computes", "waits for tensor calls", 1).edit("(one + sent)", "one"),
    Mutant("a share for seconds", "bubble over m", "p - 1 micro-batches", 1).edit("(one + sent)", "(one + sent) / m"),
    Mutant("elements", "elements", "2 bytes", 1)
    .edit("* 2 * sequence", "* sequence")
    .edit("* 2 * parameters", "* parameters"),
)
