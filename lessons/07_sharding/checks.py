"""Exercises of lesson 7, and how each is driven and judged (see cases.py and the judges)."""

from __future__ import annotations

from distlab_lesson_07 import cases, judge_state, judge_units, judges

from distlab.grading import Exercise

TITLE = "Sharding"
MINUTES = 90
NEEDS = ("01", "02", "03", "06")
AIMS = (
    "Shard optimizer state, gradients and parameters (ZeRO-1, 2, 3) by hand, and count what a rank holds and sends.",
    "Run a model by units that are gathered, used and let go, the next one gathered ahead (FSDP).",
    "Choose the size of a unit, prefetch, replicas and offload for a model and a cluster, by simulation and by runs.",
    "Write the DeepSpeed and FSDP2 settings that mean the same plan.",
)

_TORCH = ("import torch", "import torch.distributed as dist", "from torch import Tensor")
_CALLS = ("from collections.abc import Callable", *_TORCH)
_GATHER = "from distlab.sharding.calls import gather_into"
_BOTH = "from distlab.sharding.calls import gather_into, scatter_sum"

EXERCISES = (
    Exercise(
        name="07.pieces",
        title="which parts of which tensors lie in a shard",
        source="solutions:pieces_of",
        drive=cases.drive_pieces,
        judge=judges.judge_pieces,
        hints=(
            "A shard has `-(-sum(sizes) // num_shards)` elements: divided, and rounded up.",
            "Shard i is the part [i x length, (i + 1) x length) of the row; tensor t is [begin, begin + size).",
            "For each tensor: the part that both have begins at the larger begin and ends at the smaller end. Where "
            "that is not empty, subtract the tensor's begin from both.",
        ),
        worlds=(1,),
        budget=judges.budget_pieces,
    ),
    Exercise(
        name="07.step",
        title="an update in which each rank updates its shard",
        source="solutions:step_on_shard",
        drive=cases.drive_step,
        judge=judges.judge_step,
        imports=(*_CALLS, _BOTH),
        hints=(
            "`parameters.chunk(n)[rank]` is a view of the own shard: a change there is one in `parameters`.",
            "`scatter_sum(gradient, mean)` fills `mean`, as long as a shard, with this rank's part of the sum. It is "
            "the first half of an all-reduce; `gather_into(parameters, own)` is the second.",
            "Own shard as a view; scatter_sum into a new tensor; divide by n; update(own, mean); gather_into.",
        ),
        budget=judges.budget_step,
    ),
    Exercise(
        name="07.forward",
        title="gather a unit, use it, let it go",
        source="solutions:forward_units",
        drive=cases.drive_forward,
        judge=judge_units.judge_forward,
        imports=(*_CALLS, _GATHER),
        hints=(
            "A whole row has `shard.numel() * dist.get_world_size()` elements, in the shard's dtype.",
            "`gather_into(whole, shard)` fills a row that you made with torch.empty. A tensor's memory is free when "
            "the last name for it is gone.",
            "For each unit: make a row, gather into it, `x = compute(index, whole, x)`, `del whole`. Return x.",
        ),
        budget=judge_units.budget_units,
    ),
    Exercise(
        name="07.ahead",
        title="gather the next unit while this one computes",
        source="solutions:forward_ahead",
        drive=cases.drive_forward,
        judge=judge_units.judge_ahead,
        imports=(*_CALLS, _GATHER),
        hints=(
            "`work = gather_into(whole, shard, async_op=True)` returns at once, `work.wait()` when it is over.",
            "Begin with the gather of unit 0. In each round: wait for this unit, start the next, compute this one.",
            "Keep (row, work) of the unit that is coming. In round i: take both, wait, start the gather of unit i + 1 "
            "where there is one, compute, del the row.",
        ),
        budget=judge_units.budget_units,
    ),
    Exercise(
        name="07.backward",
        title="gather again, reduce and scatter, let go",
        source="solutions:backward_units",
        drive=cases.drive_backward,
        judge=judge_units.judge_backward,
        imports=(*_CALLS, _BOTH),
        hints=(
            "The last unit comes first: `for index in reversed(range(len(shards)))`.",
            "`whole_grad, grad = compute(...)`: the second is what the unit before takes. `scatter_sum(whole_grad, "
            "mean)` leaves this rank's part of the sum in `mean`.",
            "Gather the unit; compute; del the row; scatter_sum into a tensor as long as the shard; divide by n; del "
            "the whole gradient before the next unit is gathered.",
        ),
        budget=judge_units.budget_units,
    ),
    Exercise(
        name="07.clip",
        title="the norm of what nobody holds",
        source="solutions:clip_shards",
        drive=cases.drive_clip,
        judge=judge_state.judge_clip,
        imports=_TORCH,
        hints=(
            "The square of the norm is the sum of all squares. Sums can be put together over ranks; norms cannot.",
            "What is replicated is on every rank already. In an all-reduced sum it would count n times.",
            "Sum of squares of the shards, as one float64 tensor; all_reduce it; add the squares of the replicated "
            "ones; root. Multiply each gradient in place by min(1, max_norm / norm). Return the norm.",
        ),
        budget=judge_state.budget_clip,
    ),
    Exercise(
        name="07.repair",
        title="spot the bug: the state dict that hangs",
        source="solutions:full_state",
        drive=cases.drive_state,
        judge=judge_state.judge_state,
        imports=(*_TORCH, _GATHER),
        hints=(
            "Who calls gather_into, and who waits for it?",
            "Rank 0 holds a shard of each tensor. The rest is on ranks that have returned already.",
            "Let every rank gather every tensor; put it into `state` only where dist.get_rank() == 0.",
        ),
        broken="mutants:full_state_on_rank_0",
        on_failure=judge_state.state_failure,
        budget=judge_state.budget_state,
    ),
)
