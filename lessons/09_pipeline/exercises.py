"""Exercises of lesson 9; `checks/` says how each is driven and judged, and what wrong versions it must reject."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Pipelines"
MINUTES = 90
NEEDS = ("01", "03", "06")
AIMS = (
    "Write the order in which a rank runs its micro-batches: GPipe, 1F1B, zero-bubble, and your own.",
    "Run a model that is cut into stages, on real ranks, equal to one process, with gradients scaled and no hang.",
    "Say where each bubble comes from, what removes it, and what that costs: memory, messages, split backward passes.",
    "Choose schedule, stages and micro-batches by simulation, and check the choice against measured timelines.",
)

_TORCH = ("import torch", "import torch.distributed as dist", "from torch import Tensor, nn")
_RUN = ("from collections.abc import Callable", *_TORCH, "from distlab.plan import Action")

EXERCISES = (
    Exercise(
        name="09.gpipe",
        title="the order of a rank in GPipe",
        minutes=4,
        difficulty=1,
        source="solutions:gpipe_order",
        hints=(
            "An action is a text: stage, kind, micro-batch. Rank 2's first one is '2F0'.",
            'f"{rank}F{i}" is the forward pass of micro-batch i.',
            "A list of all F's, micro-batches 0 to m - 1, then a list of all B's in the same order.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="09.bubble",
        title="idle time over total time, in closed form",
        minutes=5,
        difficulty=1,
        source="solutions:bubble_fraction",
        hints=(
            "Count in units of one stage's work on one micro-batch. How many units is a rank busy?",
            "The last rank starts when a micro-batch has gone through all stages before it: how many are these?",
            "A rank is busy for v m units and idle for p - 1 of them. Divide idle by the sum of both.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="09.one_f_one_b",
        title="the order of a rank in 1F1B",
        minutes=8,
        difficulty=2,
        source="solutions:one_f_one_b_order",
        hints=(
            "The last rank can run 3B0 right behind 3F0. How many forward passes can rank 2 run before 2B0?",
            "Rank r warms up with p - 1 - r forward passes (never more than there are); then come pairs F, B.",
            "Append the warm-up's F's. For i from 0 to m - 1: append F of warm_up + i if there is such a micro-batch, "
            "then B of i.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="09.run_rank",
        title="one rank of a pipeline, on real ranks",
        minutes=18,
        difficulty=3,
        source="solutions:run_rank",
        imports=_RUN,
        hints=(
            "F: get x (from inputs, or by dist.recv into torch.empty_like(like)), run the stage, hand y.detach() on. "
            "B: get the gradient of y from the next rank, y.backward(grad), hand x.grad back. Keep x and y in between.",
            "A received x needs x.requires_grad_(), or it gets no gradient. The last rank's y is the loss divided by "
            "the number of micro-batches. dist.isend, not dist.send: two neighbours would wait for each other.",
            "A dict from micro-batch to (x, y). For each action, F: input or recv, stage, loss / m or isend, keep. B: "
            "take out of the dict, recv the gradient unless last, backward, isend x.grad unless first. At the end wait "
            "for what you sent; return the sum of the scaled losses on the last rank.",
        ),
    ),
    Exercise(
        name="09.split",
        title="a backward pass in two halves",
        minutes=8,
        difficulty=2,
        source="solutions:split_backward",
        imports=("from collections.abc import Callable", "from torch import Tensor"),
        hints=(
            "tanh'(z) is 1 - tanh(z)^2, and tanh(z) is activations[k + 1].",
            "From the last layer to the first: through tanh, then grad @ weights[k].T. What the weights of layer k "
            "need is activations[k] and the gradient between the two.",
            "Loop backward; append (activations[k], grad) after tanh's factor; multiply grad by weights[k].T. Return "
            "grad and a function that returns x.T @ grad of each pair, layer 0 first.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="09.zero_bubble",
        title="weight gradients where the bubble was",
        minutes=12,
        difficulty=3,
        source="solutions:zero_bubble_order",
        hints=(
            "Start from 1F1B and write I in place of each B. Where may W of micro-batch i stand at the earliest?",
            "Rank 0 has as many in flight as it may: its W's follow at once. Rank r has r to spare.",
            "As 1F1B, with I. After I of micro-batch i append W of i - r, if i >= r. At the end append the W's that "
            "are left.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="09.repair",
        title="spot the bug: four GPUs, no faster than one",
        minutes=7,
        difficulty=2,
        source="solutions:forward_all",
        imports=_TORCH,
        hints=(
            "What does rank 0 wait for before it takes the next micro-batch?",
            "A broadcast ends on a rank when its root has come to it: rank 0 waits there for the last stage.",
            "Keep each y in a list in the loop; broadcast all of them after it. Hand on with isend, and wait for these "
            "sends before the broadcasts write into the same tensors.",
        ),
        broken="told at once",
    ),
)
