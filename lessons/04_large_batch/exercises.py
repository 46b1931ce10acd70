"""Exercises of lesson 4; `checks/` defines by its name how each is driven, varied and wrong on purpose."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Large batches"
MINUTES = 75
NEEDS = ("01", "03")
AIMS = (
    "Scale a learning rate with the batch, linearly or by the root, warm it up, and resume it without a jump.",
    "Accumulate gradients over micro-batches and ranks so that they equal one large batch.",
    "Write LARS and LAMB, and say where implementations differ and what it does.",
    "Read from measured curves, with their spread, where large batches cost accuracy and what helps.",
)

_TORCH = ("import torch", "from torch import Tensor")

EXERCISES = (
    Exercise(
        name="04.rate",
        title="a rate that grows with the batch",
        minutes=5,
        difficulty=1,
        source="solutions:learning_rate",
        worlds=(1,),
        hints=(
            "Compute the full rate first: how many times the base batch is the batch?",
            "In the warmup, update 0 has 1/num_warmup of the full rate, update 1 has 2/num_warmup.",
            "peak = base_lr * batch / base_batch. While step < num_warmup return peak * (step + 1) / num_warmup, "
            "otherwise peak. With num_warmup 0 the first case never comes, so nothing is divided by zero.",
        ),
    ),
    Exercise(
        name="04.accumulate",
        title="a large batch in small pieces",
        minutes=8,
        difficulty=2,
        source="solutions:accumulate",
        imports=(
            "from collections.abc import Callable",
            "import torch.distributed as dist",
            *_TORCH,
            "from torch import nn",
        ),
        hints=(
            "backward() adds to the gradients that are there, so the micro-batches add up by themselves.",
            "The mean over 7 samples in pieces of 3, 3 and 1 is 3/7 of the first piece's mean, 3/7 of the second's and "
            "1/7 of the last one's. Multiply each loss by its share before backward.",
            "Count the samples; for each micro-batch run the model, multiply the loss by len(inputs) / all samples, "
            "call backward. After the loop, once: divide each gradient by world_size and all_reduce it.",
        ),
    ),
    Exercise(
        name="04.lars",
        title="LARS: steps as long as the layer allows",
        minutes=12,
        difficulty=2,
        source="solutions:lars_step",
        imports=_TORCH,
        worlds=(1,),
        hints=(
            "`tensor.norm()` is the length. Start with ratio = 1 and change it only where it applies.",
            "The docstring's denominator has two terms, and a tensor of one dimension has neither ratio nor decay.",
            "If weight.dim() == 1, decay = 0. Otherwise, if |w| and |g| + decay * |w| are above zero, ratio = "
            "coefficient * |w| / (|g| + decay * |w|). New buffer = momentum * buffer + lr * ratio * (gradient + decay "
            "* weight). Return weight - buffer, and the buffer.",
        ),
    ),
    Exercise(
        name="04.lamb",
        title="LAMB: Adam's direction, the layer's length",
        minutes=10,
        difficulty=2,
        source="solutions:lamb_step",
        imports=_TORCH,
        worlds=(1,),
        hints=(
            "First Adam: two running means, corrected copies of both, their quotient.",
            "Decay is added to the quotient *before* its length is taken; the corrected copies are not returned.",
            "mean and square as in the docstring; update = (mean / (1 - 0.9**step)) / (sqrt(square / (1 - 0.999**step))"
            " + 1e-6) + decay * weight; ratio = |weight| / |update|, or 1 where one is zero; return weight - lr * ratio"
            " * update, mean, square.",
        ),
    ),
    Exercise(
        name="04.repair",
        title="spot the bug: fine until it is resumed",
        minutes=8,
        difficulty=2,
        source="solutions:warm_up",
        imports=("from collections.abc import Callable", "import torch"),
        worlds=(1,),
        hints=(
            "What is in `optimizer.param_groups[0]['lr']` after the optimizer was loaded from a checkpoint?",
            "The rate must be a function of the step, and of nothing that changes while training.",
            "Take peak_lr, not what the optimizer holds, and set the rate before every update: peak_lr * min(1, (step "
            "+ 1) / num_warmup).",
        ),
        broken="from what it finds",
    ),
)
