"""Exercises of lesson 7; `checks/` defines by its name how each is driven, varied and wrong on purpose."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Sharding"
MINUTES = 90
NEEDS = ("01", "02", "03", "06")
AIMS = (
    "Shard optimizer state, gradients and parameters (ZeRO-1, 2, 3) by hand, and count what a rank holds and sends.",
    "Run a model by units that are gathered, used and freed, the next one gathered ahead (FSDP).",
    "Choose the size of a unit, prefetch, replicas and offload for a model and a cluster, by simulation and by runs.",
    "Write the DeepSpeed and FSDP2 settings that mean the same plan.",
    "Run an optimizer that needs whole matrices (Muon) on shards, by owners whose work is balanced.",
)

_TORCH = ("import torch", "import torch.distributed as dist", "from torch import Tensor")
_CALLS = ("from collections.abc import Callable", *_TORCH)
_GATHER = "from distlab.sharding import gather_into"
_BOTH = "from distlab.sharding import gather_into, scatter_sum"

EXERCISES = (
    Exercise(
        name="07.pieces",
        title="which parts of which tensors lie in a shard",
        minutes=10,
        difficulty=2,
        source="solutions:pieces_of",
        hints=(
            "A shard has `-(-sum(sizes) // num_shards)` elements: divided, and rounded up.",
            "Shard i is the part [i x length, (i + 1) x length) of the row; tensor t is [begin, begin + size).",
            "For each tensor: the part that both have begins at the larger begin and ends at the smaller end. Where "
            "that is not empty, subtract the tensor's begin from both.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="07.step",
        title="an update in which each rank updates its shard",
        minutes=7,
        difficulty=1,
        source="solutions:step_on_shard",
        imports=(*_CALLS, _BOTH),
        hints=(
            "`parameters.chunk(n)[rank]` is a view of the own shard: a change there is one in `parameters`.",
            "`scatter_sum(gradient, mean)` fills `mean`, as long as a shard, with this rank's part of the sum. It is "
            "the first half of an all-reduce; `gather_into(parameters, own)` is the second.",
            "Own shard as a view; scatter_sum into a new tensor; divide by n; update(own, mean); gather_into.",
        ),
    ),
    Exercise(
        name="07.forward",
        title="gather a unit, use it, let it go",
        minutes=6,
        difficulty=1,
        source="solutions:forward_units",
        imports=(*_CALLS, _GATHER),
        hints=(
            "A whole row has `shard.numel() * dist.get_world_size()` elements, in the shard's dtype.",
            "`gather_into(whole, shard)` fills a row that you made with torch.empty. A tensor's memory is free when "
            "the last name for it is gone.",
            "For each unit: make a row, gather into it, `x = compute(index, whole, x)`, `del whole`. Return x.",
        ),
    ),
    Exercise(
        name="07.ahead",
        title="gather the next unit while this one computes",
        minutes=10,
        difficulty=3,
        source="solutions:forward_ahead",
        imports=(*_CALLS, _GATHER),
        hints=(
            "`work = gather_into(whole, shard, async_op=True)` returns at once, `work.wait()` when it is over.",
            "Begin with the gather of unit 0. In each round: wait for this unit, start the next, compute this one.",
            "Keep (row, work) of the unit that is coming. In round i: take both, wait, start the gather of unit i + 1 "
            "where there is one, compute, del the row.",
        ),
    ),
    Exercise(
        name="07.backward",
        title="gather again, reduce and scatter, free",
        minutes=10,
        difficulty=2,
        source="solutions:backward_units",
        imports=(*_CALLS, _BOTH),
        hints=(
            "The last unit comes first: `for index in reversed(range(len(shards)))`.",
            "`whole_grad, grad = compute(...)`: the second is what the unit before takes. `scatter_sum(whole_grad, "
            "mean)` leaves this rank's part of the sum in `mean`.",
            "Gather the unit; compute; del the row; scatter_sum into a tensor as long as the shard; divide by n; del "
            "the whole gradient before the next unit is gathered.",
        ),
    ),
    Exercise(
        name="07.owners",
        title="owners, so that the slowest rank is least busy",
        minutes=7,
        difficulty=1,
        source="solutions:assign_owners",
        hints=(
            "Work is 2 m^2 k + m^3 with m = min(shape) and k = max(shape). A rank's work is the sum over its matrices.",
            "Go through the matrices and give each to the rank that has least so far. In the order of the list that "
            "may end badly: a large matrix comes last, and finds all ranks half full. Which order avoids it?",
            "sorted(range(len(shapes)), key=...) gives the indices, most work first. Add each work to its rank's.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="07.by_owners",
        title="pieces to the owner, its update back",
        minutes=9,
        difficulty=2,
        source="solutions:update_by_owners",
        imports=_CALLS,
        hints=(
            "dist.gather(piece, rows, dst=owner) fills the list `rows` on the owner; on the others it is None. "
            "dist.scatter(update, rows, src=owner) is the way back.",
            "When does the owner of the second matrix begin? In one loop over all three steps it waits in the first "
            "matrix's scatter. How many loops let all owners compute at the same time?",
            "Three loops: gather; orthogonalize torch.cat(rows) where this rank is the owner; scatter the n chunks.",
        ),
    ),
    Exercise(
        name="07.repair",
        title="spot the bug: the state dict that hangs",
        minutes=8,
        difficulty=2,
        source="solutions:full_state",
        imports=(*_TORCH, _GATHER),
        hints=(
            "Who calls gather_into, and who waits for it?",
            "Rank 0 holds a shard of each tensor. The rest is on ranks that have returned already.",
            "Let every rank gather every tensor; put it into `state` only where dist.get_rank() == 0.",
        ),
        broken="only rank 0",
    ),
)
