"""Exercises of lesson 8; `checks/` defines by its name how each is driven, varied and wrong on purpose."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Tensor parallel"
MINUTES = 120
NEEDS = ("01", "02", "03", "07")
AIMS = (
    "Cut linear layers, attention heads and the vocabulary over ranks, equal to one process, with one sum each way.",
    "Say what a layer sends, 8 B S H (t-1)/t elements, and on which wires that is affordable.",
    "Split the sequence between the regions: the same bytes, 1/t of the activations.",
    "Tell the field's silent faults from a right run: a missing f, a bias that counts t times, heads cut as one piece.",
)

_TORCH = ("import torch", "import torch.distributed as dist", "from torch import Tensor")
_CALLS = ("from collections.abc import Callable", "from typing import Any", *_TORCH)
_F = "import torch.nn.functional as F"
_G = "from distlab.tensor_parallel import reduce_from_ranks"
_BOTH = "from distlab.tensor_parallel import copy_to_ranks, reduce_from_ranks"

EXERCISES = (
    Exercise(
        name="08.cut",
        title="a rank's part of a linear layer",
        minutes=4,
        difficulty=1,
        source="solutions:cut_linear",
        imports=("from torch import Tensor",),
        hints=(
            "torch keeps `weight` as [output features, input features], and computes x @ weight.T + bias.",
            "Column: this rank makes some output features, so it needs some rows of `weight` and their biases. Row: it "
            "takes some input features, so it needs some columns.",
            "`weight.chunk(t, 0)[rank]` or `weight.chunk(t, 1)[rank]`, cloned. The bias: a part for column; for row "
            "whole on rank 0 and None elsewhere, because the results are added up.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="08.f_and_g",
        title="what begins and what ends a region",
        minutes=9,
        difficulty=2,
        source="solutions:f_and_g",
        imports=_CALLS,
        hints=(
            "A class with `forward(ctx, x)` and `backward(ctx, gradient)`, both static; its `.apply` is the function.",
            "Every rank reads x whole and makes a part of what follows. So each has a part of x's gradient: sum them.",
            "f: forward `x.view_as(x)`, backward an all_reduce of a clone of the gradient. g: forward an all_reduce of "
            "a clone of x, backward the gradient as it is.",
        ),
    ),
    Exercise(
        name="08.mlp",
        title="two layers, one sum each way",
        minutes=5,
        difficulty=1,
        source="solutions:parallel_mlp",
        imports=(_F, "from torch import Tensor", _BOTH),
        hints=(
            "GeLU works on each feature alone: a rank can apply it to the features that it has made.",
            "`output` takes just the features that `widen` has made here. Each rank's result is a part of a sum.",
            "f; F.linear with widen and its bias; gelu; F.linear with output, without bias; g; add the bias.",
        ),
    ),
    Exercise(
        name="08.heads",
        title="query, key and value by heads",
        minutes=7,
        difficulty=2,
        source="solutions:heads_of",
        imports=("import torch", "from torch import Tensor"),
        hints=(
            "A head has `len(weight) // (num_heads + 2 * num_shared)` rows in each section where it occurs.",
            "Three sections, one behind the other. What must a rank have of each to attend with some heads?",
            "Raise where heads do not divide; `weight.split([A d, K d, K d])`; chunk each by ranks; torch.cat yours.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="08.cross_entropy",
        title="a loss over scores that no rank has whole",
        minutes=11,
        difficulty=3,
        source="solutions:cross_entropy",
        imports=(*_TORCH, _G),
        hints=(
            "A position's loss is log(sum of exp(score - largest)) + largest - the target's score.",
            "The largest needs no gradient: all_reduce it with dist.ReduceOp.MAX, detached. The two others are sums "
            "over ranks: g (reduce_from_ranks) adds them up, and autograd goes back through it.",
            "Columns beyond V to -inf; largest; total = g(exp(...).sum(1)); the target's score where it is here, else "
            "0, through g; mean of total.log() + largest - score.",
        ),
    ),
    Exercise(
        name="08.sequence",
        title="f and g where ranks hold parts of the sequence",
        minutes=13,
        difficulty=3,
        source="solutions:sequence_pair",
        imports=(*_CALLS, "from distlab.sharding import gather_into, scatter_sum"),
        hints=(
            "An all-reduce is a reduce-scatter and an all-gather. f and g are those two, each in its place.",
            "`gather_into(whole, part)` fills a tensor that you made; `scatter_sum(whole, part)` leaves the own part "
            "of the sum, and writes to `whole`: give it a clone. Both take rows: `.view(-1)`.",
            "Two small functions, join and add_up. The first has join forward, add_up backward; the second the "
            "other way round.",
        ),
    ),
    Exercise(
        name="08.dropout",
        title="masks that must be equal, and masks that must not",
        minutes=6,
        difficulty=2,
        source="solutions:drop",
        imports=(*_TORCH, "from distlab.rng import derive_seed"),
        hints=(
            "`torch.rand(x.shape, generator=g)` draws from your own g: torch.Generator().manual_seed(...).",
            "`derive_seed(seed, rank, purpose)` mixes all three to a seed. Whose rank counts where all hold the same?",
            "Derive the seed from this rank where is_split, else from rank 0, a purpose of its own for each. Keep x "
            "where rand >= p, and divide it by 1 - p.",
        ),
    ),
    Exercise(
        name="08.clip",
        title="one norm of three kinds of gradients",
        minutes=10,
        difficulty=2,
        source="solutions:clip_gradients",
        imports=_TORCH,
        hints=(
            "Squares of parts are added over ranks. What every rank has whole counts once.",
            "A partial gradient is one of t that make the gradient: add them up before you square.",
            "all_reduce each of `partial`; sum of squares of `split`, all_reduce it; add the squares of the others; "
            "root. Multiply all by min(1, max_norm / norm). Return the norm.",
        ),
    ),
    Exercise(
        name="08.repair",
        title="spot the bug: the embedding that loses tokens",
        minutes=6,
        difficulty=1,
        source="solutions:embed",
        imports=("import torch.distributed as dist", _F, "from torch import Tensor", _G),
        hints=(
            "With a vocabulary of 50,000 on 4 ranks it is right. And with 50,257?",
            "How many rows has `weight` on a rank, and how many tokens does the function take for a rank's?",
            "A rank holds ceil(V/t) rows: round up.",
        ),
        broken="rounded down",
    ),
)
