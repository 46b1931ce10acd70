"""Exercises of lesson 1; `checks/` defines by its name how each is driven, varied and wrong on purpose."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Ranks and messages"
MINUTES = 60
NEEDS: tuple[str, ...] = ()
AIMS = (
    "start several ranks and tell what each of them owns",
    "send and receive tensors, in the right order, without waiting forever",
    "cause a hang, read what it says, and repair it",
    "measure latency and bandwidth, and predict how long a message will take",
)

MESSAGES = ("import torch", "import torch.distributed as dist", "from torch import Tensor")

EXERCISES = (
    Exercise(
        name="01.shift",
        title="every rank hands its tensor to the next",
        minutes=8,
        difficulty=1,
        source="solutions:shift",
        imports=MESSAGES,
        timeout_s=10.0,
        hints=(
            "The next rank is `(rank + 1) % world_size`, the one before `(rank - 1) % world_size`. What are they on "
            "one rank?",
            "`dist.send` returns when the other side has received. If every rank sends first, who receives? "
            "`dist.isend` and `dist.irecv` return at once and give you a request to `wait()` for.",
            "On one rank return `tensor.clone()`. Otherwise make room with `torch.empty_like(tensor)`, start `irecv` "
            "into it from the rank before, start `isend` of `tensor` to the next one, wait for both, return what was "
            "received.",
        ),
    ),
    Exercise(
        name="01.ping_pong",
        title="two ranks play a tensor back and forth against the clock",
        minutes=8,
        difficulty=2,
        source="solutions:ping_pong",
        imports=("import time", *MESSAGES),
        timeout_s=10.0,
        worlds=(2, 3, 4),
        hints=(
            "One partner begins and the other answers. Both know both ranks, so both can decide who begins without "
            "asking.",
            "The lower rank sends, then receives; the higher rank receives, then sends. How many messages have "
            "travelled after `rounds` rounds?",
            "Read `time.perf_counter()`. Loop `rounds` times: if `rank < partner` then `send`, `recv`, else `recv`, "
            "`send`; receive into a tensor of your own (`torch.empty_like`). Read the clock again; divide by `2 * "
            "rounds`.",
        ),
    ),
    Exercise(
        name="01.fit",
        title="latency and bandwidth from measured messages",
        minutes=6,
        difficulty=1,
        source="solutions:fit",
        imports=("from collections.abc import Sequence", "import numpy as np"),
        worlds=(1,),
        hints=(
            "`alpha + size / beta` is a straight line in `size`: it starts at alpha and its slope is 1 / beta.",
            "A relative error is `(alpha + size / beta) / time - 1`. That is a straight line again, in the two "
            "columns `1 / time` and `size / time`, which should give 1.",
            "Turn both lists into arrays, stack the columns `1 / times` and `sizes / times`, solve for ones with "
            "`np.linalg.lstsq(rows, ones, rcond=None)[0]`; the first number is alpha, beta is 1 over the second.",
        ),
    ),
    Exercise(
        name="01.gather",
        title="one rank collects every rank's tensor",
        minutes=8,
        difficulty=1,
        source="solutions:gather",
        imports=MESSAGES,
        timeout_s=10.0,
        hints=(
            "Two roles: root receives from every other rank, every other rank sends once. Which of them needs a list?",
            "A tensor that you received into is overwritten by the next receive into it. And root cannot send to "
            "itself.",
            "If this rank is not root: `dist.send(tensor, root)`, return None. Else build a list: for each rank in "
            "order `torch.empty_like(tensor)`, received from that rank, or `tensor.clone()` at root's own place. "
            "Return it.",
        ),
    ),
    Exercise(
        name="01.repair",
        title="stop early, all together",
        minutes=6,
        difficulty=2,
        source="solutions:should_stop",
        broken="reduce",
        imports=MESSAGES[1:],
        hints=(
            "Let every rank print `total`. On which ranks is it the sum of all losses?",
            "`dist.reduce` brings the sum to one rank; what the others find in their tensor means nothing. Yet all of "
            "them go on to decide with it.",
            "Every rank needs the same sum: use the collective that leaves it on every rank (`dist.all_reduce`), or "
            "send the decision of rank 0 to all others.",
        ),
    ),
)
