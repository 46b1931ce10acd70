"""Exercises of lesson 3; `checks/` says how each is driven and judged, and what wrong versions it must reject."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Data parallel"
MINUTES = 120
NEEDS = ("01", "02")
AIMS = (
    "Say why gradients are averaged and why all ranks must start equal, and prove it against one process.",
    "Build the ladder: one all-reduce a parameter, one flat one, buckets, buckets that travel during backward.",
    "Predict a step's time on your machine and on a cluster; read on a timeline what is hidden and what is exposed.",
    "Accumulate gradients over micro-batches, give every sample out once, and weight what is uneven.",
    "Judge a claim about scaling by the conditions under which it holds.",
)

_TORCH = ("import torch", "import torch.distributed as dist", "from torch import nn")

EXERCISES = (
    Exercise(
        name="03.broadcast",
        title="equal starts",
        minutes=3,
        difficulty=1,
        source="solutions:broadcast_module",
        imports=_TORCH,
        hints=(
            "`dist.broadcast(tensor, src=0)` must be called by every rank: on rank 0 it sends, on the others it fills.",
            "A module's state is `module.parameters()` and `module.buffers()`: running means live in the second.",
            "For each parameter and each buffer: broadcast `tensor.detach()` from rank 0. `detach()` shares memory, so "
            "the module's own tensor is filled, and autograd has nothing to say.",
        ),
    ),
    Exercise(
        name="03.average",
        title="one all-reduce a parameter",
        minutes=5,
        difficulty=1,
        source="solutions:average_gradients",
        imports=_TORCH,
        hints=(
            "The gradient is `parameter.grad`, and it can be None where this rank did not use the parameter.",
            "`dist.all_reduce` adds in place. A mean is a sum of parts that were divided by `dist.get_world_size()`.",
            "For each parameter with requires_grad: if its gradient is None, make it zeros; divide it in place; "
            "all_reduce it. All ranks then make the same calls in the same order, whatever each of them used.",
        ),
    ),
    Exercise(
        name="03.flat",
        title="one all-reduce for all",
        minutes=8,
        difficulty=1,
        source="solutions:average_flat",
        imports=_TORCH,
        hints=(
            "`torch.cat` of the flattened gradients is one tensor; `tensor.split(sizes)` cuts it again.",
            "`module.parameters()` gives a weight that two layers share once. Missing gradients must take their place, "
            "as zeros, or the pieces behind them move.",
            "Collect the parameters that want gradients, fill missing gradients with zeros, cat, divide, all_reduce "
            "once, split by `numel()`, copy each piece (`view_as`) back into its gradient.",
        ),
    ),
    Exercise(
        name="03.buckets",
        title="which gradients travel together",
        minutes=8,
        difficulty=2,
        source="solutions:fill_buckets",
        hints=(
            "Walk the indices with `reversed(range(len(sizes_bytes)))`.",
            "Keep the open bucket's members and its bytes; close it when the bytes reach the capacity, not before.",
            "Append the index, add its bytes; if the sum is at least bucket_bytes, append the members to the buckets "
            "and begin an empty one. After the loop, what is open is the last bucket, if it holds anything.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="03.overlap",
        title="send while backward computes",
        minutes=20,
        difficulty=3,
        source="solutions:overlap",
        imports=(
            "from collections.abc import Callable",
            "from distlab.data_parallel.steps import FlatBucket",
        ),
        hints=(
            "`parameter.register_post_accumulate_grad_hook(f)` calls `f(parameter)` in backward, as soon as that "
            "gradient is there. Count, for each bucket, how many are still missing.",
            "Start buckets strictly in order: while the next one misses nothing, start it. So a later bucket that is "
            "full first waits for its turn, and all ranks call in one order.",
            "Keep a list `missing` and the number started. Hook: lower missing, then start all that are next and full. "
            "synchronize(): start the rest, finish all, set both back for the next step.",
        ),
    ),
    Exercise(
        name="03.accumulate",
        title="send once for several micro-batches",
        minutes=8,
        difficulty=2,
        source="solutions:accumulate",
        imports=(
            "from collections.abc import Callable, Iterable",
            "from contextlib import nullcontext",
            "import torch",
            "from torch.nn.parallel import DistributedDataParallel",
        ),
        hints=(
            "A second backward adds its gradient to parameter.grad. What makes the sum of num_accumulated gradients "
            "their mean?",
            "DDP decides in *forward* whether the backward that follows sends. So no_sync() must surround both, "
            "for all but the last micro-batch of an update. `nullcontext()` is a context that does nothing.",
            "Count micro-batches from 1; the last of an update has number % num_accumulated == 0. Inside no_sync() (or "
            "nullcontext() for the last): forward, loss / num_accumulated, backward. After the last: step, zero_grad.",
        ),
    ),
    Exercise(
        name="03.sampler",
        title="every sample once, wherever a run resumes",
        minutes=7,
        difficulty=2,
        source="solutions:samples_at",
        imports=("import torch", "from distlab.rng import derive_seed"),
        hints=(
            "`divmod(position, num_samples)` is the number of the epoch and how far into it the position is.",
            "Make the order of the whole epoch on every rank alike: a torch.Generator seeded from seed and epoch "
            '(`derive_seed(seed, 0, f"epoch {epoch}")`) and `torch.randperm(num_samples, generator=...)`.',
            "Cut the batch out of the order, `order[start : start + batch_size]`: a slice ends where the order ends. "
            "Then deal it to the ranks like cards: `[rank::world_size]`, and `tolist()`.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="03.uneven",
        title="every token counts the same",
        minutes=7,
        difficulty=2,
        source="solutions:token_weights",
        imports=("import torch", "import torch.distributed as dist"),
        hints=(
            "Write down the mean over all tokens of all ranks. In it, what stands before the mean loss of a "
            "micro-batch of n tokens?",
            "n / total, where total counts the tokens of all ranks: one all_reduce of a tensor with one number. Then "
            "averaging over ranks divides by world_size, which is not wanted here.",
            "total = torch.tensor(sum(num_tokens)); all_reduce it, also on a rank whose list is empty; return "
            "n * world_size / total for each n.",
        ),
    ),
    Exercise(
        name="03.repair",
        title="spot the bug: the loss falls, and yet",
        minutes=8,
        difficulty=2,
        source="solutions:average_in_hooks",
        imports=_TORCH,
        hints=(
            "Print what the hook is handed: its shape is right in either case. Compare its values with the weights.",
            "`register_hook` hands over a gradient. What does `register_post_accumulate_grad_hook` hand over?",
            "The argument is the parameter, so the code averages weights and leaves each rank's gradient its own. "
            "Divide and all-reduce `parameter.grad` instead.",
        ),
        broken="weights, not gradients",
    ),
)
