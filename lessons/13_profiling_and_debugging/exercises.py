"""Exercises of lesson 13; `checks/` defines by its name how each is driven, varied and wrong on purpose."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Profiling and debugging"
MINUTES = 90
NEEDS = ("01", "03", "12")
AIMS = (
    "Read a trace of several ranks: what is exposed, who is late, and what each of them costs.",
    "Say whether a step waits for its loader, for computing or for the wire, and feed it data that arrives in time.",
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
        name="13.limit",
        title="loader, step or wire: what a step waits for",
        minutes=7,
        difficulty=2,
        source="solutions:limit_of_step",
        hints=(
            "The step waits for one rank: the one whose sync begins last. Look at its time alone.",
            "Wire: from then to the last end of a sync. Step: what its spans of computing cover, each moment once.",
            "Loader: cut its loads off where its sync begins; what they and computing cover, less what computing "
            "covers. Divide the largest of the three by the time from the first start to the last end.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="13.resume",
        title="on in the middle of a shard, with more ranks or fewer",
        minutes=8,
        difficulty=2,
        source="solutions:next_reads",
        imports=("from bisect import bisect_right", "from itertools import accumulate"),
        hints=(
            "The position is one number: what all old ranks together have used up. How many samples are left?",
            "With `each, more = divmod(batch, num_ranks)`, rank r begins at position + r * each + min(r, more).",
            "ends = list(accumulate(files)). The token's file is bisect_right(ends, token), past empty files. The "
            "offset is the token less ends[file] - files[file].",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="13.balance",
        title="samples of unequal lengths, shared so that no rank is late",
        minutes=6,
        difficulty=2,
        source="solutions:share_by_length",
        hints=(
            "One long sample at the end spoils any share. In which order do you hand samples out?",
            "Longest first, each to the rank with the fewest tokens so far.",
            "sorted(range(len(lengths)), key=lambda sample: -lengths[sample]). With same_count, a rank takes "
            "len(lengths) // num_ranks samples at most.",
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
