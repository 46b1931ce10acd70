"""Exercises of lesson 13; `checks/` defines by its name how each is driven, varied and wrong on purpose."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Profiling and debugging"
MINUTES = 90
NEEDS = ("01", "03", "12")
AIMS = (
    "Read a trace of several ranks: what is exposed, who is late, and what each of them costs.",
    "Bring traces of several machines to one clock, and say how far it can be off.",
    "Read a hang: who waits for whom, and the first call in which a rank does what the others do not.",
    "Find a flipped bit in replicas that should be equal, with few comparisons.",
)

_TORCH = ("import torch", "import torch.distributed as dist", "from torch import Tensor")

EXERCISES = (
    Exercise(
        name="13.exposed",
        title="communication that nothing hides",
        minutes=9,
        difficulty=2,
        source="solutions:exposed_ns",
        hints=(
            "Only at a start or an end does anything change. Put all of them in one list, sorted by time.",
            "Walk along it and keep two counts: how many calls are under way, and how many spans of computing.",
            "Between two neighbours of the list, nothing changes: if a call is under way and nothing is computed, add "
            "the time between them. Then change the counts by +1 at a start and -1 at an end.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="13.late",
        title="what each rank's lateness costs",
        minutes=8,
        difficulty=1,
        source="solutions:cost_of_lateness",
        hints=(
            "Look at one call: when did each rank come? zip(*arrivals) gives the times call by call.",
            "The last one is to blame, and only for the time after the last but one.",
            "For each call: sort the times; add the last minus the last but one to the rank that came last.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="13.clocks",
        title="clocks brought together by collectives",
        minutes=10,
        difficulty=2,
        source="solutions:clock_offsets",
        imports=("import statistics",),
        hints=(
            "Which moment do all ranks share: when they come to a call, or when they leave it?",
            "ends[0][k] - ends[r][k], for all calls k: the median of these is the offset, most of the time.",
            "Bounds: the offset is at least starts[0][k] - ends[r][k] and at most ends[0][k] - starts[r][k], for every "
            "k. Take the median, then the larger of it and the largest lower bound, then the smaller of that and the "
            "smallest upper bound.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="13.dearest",
        title="loader, uneven ranks or network: what costs most",
        minutes=9,
        difficulty=2,
        source="solutions:dearest",
        imports=("import statistics",),
        hints=(
            "First the step as it is: the longest data + compute, plus the shortest sync. Then without one thing.",
            "Without loading: the longest compute, plus the network. Without the network: the same step less the "
            "shortest sync.",
            "With even ranks: the longest data + min(compute, statistics.median_low of all computes), plus the "
            "network. Return the name with the largest saving.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="13.divergence",
        title="the first call that differs between ranks",
        minutes=12,
        difficulty=3,
        source="solutions:first_divergence",
        hints=(
            "Go through the numbers 0, 1, 2, ... and compare the calls of all ranks. A rank that makes no more calls "
            "has None there.",
            "What most ranks do is right: max(turns, key=turns.count). Look for the first number at which a rank does "
            "something else; then compare two calls of each side.",
            "mine and theirs are the next two calls. Nothing in mine: ended. The same two turned round: swapped. "
            "mine[0] is theirs[1]: skipped. mine[1] is theirs[0], or theirs is empty: extra. Equal operations: other "
            "shape. Else: other operation.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="13.flip",
        title="the first flipped bit, by few comparisons",
        minutes=11,
        difficulty=3,
        source="solutions:find_flip",
        imports=_TORCH,
        hints=(
            "Compare the last step first: if all ranks agree there, no bit has flipped.",
            "One number for a step is enough: sums[step].sum(). All ranks gather all of these, so all of them take the "
            "same decision; then half of the steps are left.",
            "Keep low and high. While low < high: gather the sums of the step in the middle; if they differ, high is "
            "the middle, else low is the one after. At the end gather sums[low]; torch's mode(0) is the majority.",
        ),
        worlds=(3, 4),
    ),
    Exercise(
        name="13.repair",
        title="spot the bug: communication that takes no time",
        minutes=6,
        difficulty=1,
        source="solutions:time_sections",
        imports=("from collections.abc import Callable", "from itertools import pairwise", *_TORCH),
        hints=(
            "What does the clock measure between the second and the third cut?",
            "all_reduce with async_op=True returns at once; the bytes travel later.",
            "Wait for all works, and divide, before the clock is read for the end of sync.",
        ),
        broken="sync looks free",
    ),
)
