"""Exercises of lesson 10; `checks/` says how each is driven and judged, and what wrong versions it must reject."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "All axes on one mesh"
MINUTES = 90
NEEDS = ("03", "07", "08", "09")
AIMS = (
    "Say where a rank stands on a mesh, who its neighbours are on each axis, and what it works on.",
    "Say for every parameter over which axes its gradient is summed and by what it is divided; clip by the true norm.",
    "Train a GPT on a mesh of data, tensor and pipeline, equal to one process, and check the predicted step.",
    "Choose degrees and the order of axes for a cluster of nodes by simulation, and say what decides.",
    "Say how a tensor lies on each axis, move it with the fewest bytes, and find a missing sum before anything runs.",
)

_TORCH = ("import torch", "import torch.distributed as dist", "from torch import Tensor")
_PLACEMENTS = "from distlab.placements import Partial, Placement, Replicate, Shard"

EXERCISES = (
    Exercise(
        name="10.my_batch",
        title="samples, positions and micro-batches of a rank",
        minutes=7,
        difficulty=1,
        source="solutions:my_part",
        imports=("from torch import Tensor", "from distlab.plan import Mesh"),
        hints=(
            "mesh.coordinates(rank) has the places, dict(mesh.axes) the sizes. Which axes hold copies of the weights "
            "and take samples of their own?",
            "data x expert replicas; number them place['data'] * size of expert + place['expert']. batch.chunk(n)[i] "
            "cuts samples, batch.chunk(n, dim=1)[i] positions.",
            "Chunk the batch by replicas and take the own one; chunk it along dim 1 by context and take the own one; "
            "chunk that into micro-batches. Tensor and pipeline play no part.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="10.gradient_axes",
        title="which gradient is summed over which axes",
        minutes=10,
        difficulty=3,
        source="solutions:gradient_axes",
        hints=(
            "Sum where ranks hold the same parameter and have found different parts of its gradient.",
            "data, expert and context ranks go over different positions: all hold copies of a matrix, but only one "
            "rank of the expert axis holds a given expert. Copies that found the same gradient are not summed.",
            "data, expert, context; without expert for 'expert'; with tensor for 'norm' if sequence_parallel; with "
            "pipeline for 'tied'. Divide by data x expert x context, always.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="10.global_norm",
        title="the norm of a model that no rank holds",
        minutes=9,
        difficulty=2,
        source="solutions:global_norm",
        imports=("from math import prod", *_TORCH),
        hints=(
            "Sums of squares can be put together over ranks. Whatever has copies must not be counted for each of them.",
            "groups[axis].size() is the number of ranks along an axis. A gradient has as many copies as the product of "
            "the sizes of the axes that are not in split_over[name].",
            "Add up square().sum() / copies of all gradients in one float64 number; all_reduce it over every group; "
            "return the root.",
        ),
    ),
    Exercise(
        name="10.place",
        title="which axis on which wire",
        minutes=10,
        difficulty=2,
        source="solutions:place_axes",
        imports=("from itertools import permutations",),
        hints=(
            "A group of an axis stays in a node if the axis' size times the sizes of all faster axes is at most the "
            "devices of a node.",
            "There are at most 120 orders of five axes: try all. Sorting by traffic is not enough: an axis that does "
            "not fit a node should leave the room inside to others.",
            "For an order: go from the last axis to the first, multiply the sizes, and add up the traffic of each axis "
            "of more than one rank at which the product is above devices_per_node. Return the cheapest permutation.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="10.redistribute",
        title="the cheapest redistribution on one axis",
        minutes=10,
        difficulty=2,
        source="solutions:redistribute_axis",
        imports=(*_TORCH, _PLACEMENTS),
        hints=(
            "R -> S(d) needs no call, nor does what stays. Of each other change: which call gives a rank no more than "
            "it keeps?",
            "P -> R: all_reduce of a copy. S(d) -> R: all_gather, torch.cat along d. P -> S(d): reduce_scatter. "
            "S(d) -> S(e): all_to_all_single. The last two take n pieces: the i-th is for rank i.",
            "local.chunk(n, after.dim), made contiguous, are the pieces. reduce_scatter fills a tensor like the first. "
            "all_to_all_single takes torch.cat(pieces) and fills one like it; put what arrived, in n chunks, together "
            "along before.dim.",
        ),
    ),
    Exercise(
        name="10.missing_sum",
        title="the missing all-reduce, from placements alone",
        minutes=8,
        difficulty=2,
        source="solutions:missing_sum",
        imports=(_PLACEMENTS,),
        hints=(
            "Keep a dict of how each name lies, and go through the lines once: what a line makes is an input of later "
            "ones.",
            "A line may run on summands, and the sum come later, where f(a + b) = f(a) + f(b). Which lines are such an "
            "f? Not a product of two summands, and not a summand plus what is whole on every rank.",
            "A dict of (operation, placements) for what passes a Partial on: add P P, matmul P R and R P, sum P, "
            "all_reduce P. Any other line with a P among its operands is the one. In the end look at the last result.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="10.find_the_bug",
        title="spot the bug: loss falls, and it is not one process's",
        minutes=10,
        difficulty=3,
        source="solutions:step_on_mesh",
        imports=_TORCH,
        hints=(
            "Two ranks of one tensor group add up parts of an output. Of which samples?",
            "dist.get_rank() is the place among all ranks. dist.get_rank(group) is the place in a group.",
            "Take samples by the place in the data group, of as many parts as that group has ranks.",
        ),
        broken="by rank",
    ),
)
