"""Exercises of lesson 6; `checks/` says how each is driven and judged, and what wrong versions it must reject."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Memory"
MINUTES = 90
NEEDS = ("01", "03")
AIMS = (
    "Account for every byte of a 7B, 70B and 175B model in training, and check the account by measurement.",
    "Keep fewer activations: recompute blocks in backward, and accumulate micro-batches.",
    "Train with 16-bit and 8-bit numbers: master weights, and scales that all ranks share.",
    "Say before a run whether a plan fits a device, and which change makes it fit.",
)

_PLAN = ("from distlab.plan import Plan, Precision", "from distlab.plan.sharding import DTYPE_BYTES")

EXERCISES = (
    Exercise(
        name="06.states",
        title="what training holds, however small the batch",
        minutes=8,
        difficulty=1,
        source="solutions:state_bytes",
        imports=_PLAN,
        hints=(
            "Four kinds: parameters, gradients, optimizer, master weights. First find each kind's bytes per parameter, "
            "with `DTYPE_BYTES[precision.compute]` and so on.",
            "A rank's shard has ceil(parameters / shards) elements: `-(-num_parameters // shards)` in Python.",
            "A table of (bytes each, first stage that splits it): parameters 3, gradients 2, optimizer and master "
            "weights 1. Multiply the bytes by the shard where the plan's stage has reached that number, else by all.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="06.activations",
        title="what a layer keeps for backward",
        minutes=6,
        difficulty=1,
        source="solutions:activation_bytes",
        hints=(
            "Work in units of s B h bytes, and in two parts: what tensor parallelism leaves whole, and what it splits.",
            "On one rank: 10 whole and 24 + 5 a s / h split. Selective: 10 and 24. Full: 2 whole and nothing else.",
            "unit x (whole / (t if sequence parallel else 1) + split / t).",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="06.recompute",
        title="run a block again instead of keeping what it made",
        minutes=15,
        difficulty=3,
        source="solutions:recompute",
        imports=("from collections.abc import Callable", "import torch", "from torch import Tensor"),
        hints=(
            "A class derived from `torch.autograd.Function`, with static methods `forward(ctx, x, anchor)` and "
            "`backward(ctx, gradient)`. Inside both nothing is recorded; `ctx.save_for_backward(x)` keeps x.",
            "Keep `torch.get_rng_state()` too. In backward: `again = x.detach().requires_grad_()`, then the block "
            "under `torch.enable_grad()` and `torch.random.fork_rng(devices=[])` with the kept state set.",
            "`torch.autograd.backward(output, gradient)` adds to the parameters' gradients and puts x's into "
            "again.grad: return that, and None for the anchor. The anchor is a zero that needs a gradient; without it "
            "autograd skips your backward where x is data.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="06.repair",
        title="spot the bug: accumulation",
        minutes=8,
        difficulty=2,
        source="solutions:accumulate_gradients",
        imports=("import torch", "import torch.nn.functional as F", "from torch import Tensor, nn"),
        hints=(
            "The gradients are right. How many logits are alive when backward begins?",
            "A loss keeps everything it was made from until its backward has run. `mean + loss` keeps them all.",
            "Call backward in the loop, on each loss; gradients add up by themselves. Add up `loss.item()`.",
        ),
        broken="one backward",
        worlds=(1,),
    ),
    Exercise(
        name="06.master",
        title="a float32 copy that remembers small steps",
        minutes=5,
        difficulty=1,
        source="solutions:update_with_master",
        imports=("from torch import Tensor",),
        hints=(
            "The truth is in the masters. The 16-bit weights are their rounded copy, made new after each step.",
            "`gradient.float()` first, then times lr: a product in 16 bits is rounded to 16 bits.",
            "In a loop over the three lists: `master.sub_(lr * gradient.float())`, then `weight.copy_(master)`.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="06.eight",
        title="eight bits, with a scale that all ranks agree on",
        minutes=10,
        difficulty=2,
        source="solutions:gather_in_eight_bits",
        imports=("import torch", "import torch.distributed as dist", "from torch import Tensor"),
        hints=(
            "All parts must be multiplied by one number, or nobody can divide by it afterwards. It follows from the "
            "largest magnitude of the whole weight, of which each rank knows that of its part: all_reduce with MAX.",
            "First multiply, then cast: `(part * scale).to(torch.float8_e4m3fn)`. With a largest magnitude of 0 the "
            "scale is 1.",
            "Bytes travel as uint8: `eight.view(torch.uint8)`, all_gather, `torch.cat`, `.view(torch.float8_e4m3fn)`. "
            "Then `.float() / scale`, also of the own part: all ranks must hold the same bits.",
        ),
    ),
)
