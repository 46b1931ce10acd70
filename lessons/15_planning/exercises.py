"""Exercises of lesson 15; `checks/` defines by its name how each is driven, varied and wrong on purpose."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Choose a plan, and defend it"
MINUTES = 90
NEEDS = ("06", "10")
AIMS = (
    "Say on one page whether a plan fits, how long its step takes and what its run costs, and by how much that is off.",
    "Search the degrees by rules, and choose the cheapest run that is in time, with failures.",
    "Say what DDP, DeepSpeed, FSDP, Megatron-LM and Horovod are for, and write one plan in the words of each.",
    "Judge popular claims by computing them.",
)

_PLAN = ("from distlab.plan import Plan",)

EXERCISES = (
    Exercise(
        name="15.fits",
        title="whether a plan fits",
        minutes=11,
        difficulty=2,
        source="solutions:bytes_per_gpu",
        imports=_PLAN,
        hints=(
            "Two sums: states, which are there all the time, and activations, which forward leaves for backward.",
            "States: a GPU's share of the parameters, times 12 + 4 + 2 bytes, each of the three divided by plan.data "
            "where the sharding stage has reached it. Activations: bytes per token and hidden element, times tokens, "
            "hidden, its layers, and the micro-batches that are held.",
            "share = parameters / (tensor x pipeline); 10 / s + 24 / tensor, with s = tensor under sequence "
            "parallelism and else 1; 2 / s under full recompute; held = min(pipeline, micro-batches).",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="15.step",
        title="where the seconds of a step go",
        minutes=13,
        difficulty=3,
        source="solutions:step_parts",
        imports=("from distlab.plan import Cluster, Plan",),
        hints=(
            "First what one micro-batch takes on one stage: its operations over the rate, and its tensor calls over "
            "their wire. The rest follows from these two.",
            "A step has m of both. The bubble has p - 1 of both. The wire of a group: is it larger than a node?",
            "data: 2 (d - 1) / d x 2 bytes x parameters / (t p), over the wire of t x d GPUs, less 2/3 of one "
            "micro-batch's compute, and never below 0.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="15.choose",
        title="the fastest degrees that fit",
        minutes=11,
        difficulty=2,
        source="solutions:best_degrees",
        imports=("from collections.abc import Callable",),
        hints=(
            "Two loops, over tensor and pipeline degrees; the data degree is the number of GPUs divided by both.",
            "Go on to the next where something does not divide, then where fits says no. Then ask seconds.",
            "Collect (seconds, tensor, pipeline, data) in a list. min of such tuples compares seconds first, then "
            "tensor, then pipeline. None for an empty list.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="15.bill",
        title="days and dollars, with failures",
        minutes=8,
        difficulty=2,
        source="solutions:run_bill",
        imports=("from math import inf, sqrt",),
        hints=(
            "Everything in seconds. How often does any of the GPUs fail?",
            "M = 3600 x mtbf_hours / num_gpus; the interval is sqrt(2 x save_s x M); three parts of the time are lost.",
            "useful = 1 - save_s / interval - interval / (2 M) - restart_s / M. Hours are steps x seconds / useful / "
            "3600, infinite where useful is not above 0; dollars are hours x GPUs x price.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="15.cheapest",
        title="spot the bug: no offer is in time, says the program",
        minutes=4,
        difficulty=1,
        source="solutions:cheapest",
        imports=("from collections.abc import Sequence",),
        hints=(
            "Call it with a cheap offer that is late and an expensive one that is in time.",
            "It looks at the deadline of one offer. Of which?",
            "First leave out the offers that are late, then take the cheapest of the rest; None where nothing is left.",
        ),
        broken="cheapest, then in time",
        worlds=(1,),
    ),
    Exercise(
        name="15.capstone",
        title="plan a 70B run on a budget, and defend it",
        minutes=14,
        difficulty=3,
        source="solutions:plan_70b",
        imports=(
            "from distlab.plan import Plan, Sharding",
            "from simulator import Failures, ModelDescription, Run, bill, cluster, memory_of, simulate",
        ),
        hints=(
            "Two questions in one: how many GPUs, and which plan on them. Answer the second first: it is nearly the "
            "same for all numbers of GPUs.",
            "Make a short list of plans from what you saw above: what the advisor found, and your own search's. For "
            "each number of GPUs, the data degree is what is left, and the micro-batches are 256 / data.",
            "For 64, 128, 256 and 512 GPUs and each plan of the list: leave out what memory_of says is above 76 GB; "
            "bill(simulate(...), Run(100e9, 2.50, Failures('llama-3'))); keep what is in time and in the budget; "
            "return the cheapest.",
        ),
        worlds=(1,),
        timeout_s=60,
    ),
)
