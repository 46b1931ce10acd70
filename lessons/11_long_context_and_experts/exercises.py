"""Exercises of lesson 11; `checks/` says how each is driven and judged, and what wrong versions it must reject."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Long context and experts"
MINUTES = 90
NEEDS = ("02", "03", "06")
AIMS = (
    "Merge attention over some keys with attention over others, exactly, and run it round a ring of ranks.",
    "Say from how many tokens per rank on a ring hides its messages, and when an all-to-all sends less.",
    "Route tokens to experts with a capacity, send them there and back by all-to-all, and count who was dropped.",
    "Keep experts evenly loaded, reduce the right gradients over the right ranks, and say what imbalance costs.",
)

_TORCH = ("import torch", "from torch import Tensor")
_RANKS = ("import torch", "import torch.distributed as dist", "from torch import Tensor")

EXERCISES = (
    Exercise(
        name="11.merge",
        title="attention over two sets of keys, from attention over each",
        minutes=5,
        difficulty=1,
        source="solutions:merge",
        imports=_TORCH,
        hints=(
            "The sum of weights over both sets is exp(log_sum) + exp(new_log_sum). What part of it is the first set's?",
            "torch.logaddexp(a, b) is log(exp(a) + exp(b)), without ever making exp(a).",
            "total = logaddexp of both; each mean counts with exp(its log_sum - total); return the sum, and total.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="11.zigzag",
        title="positions of a rank, so that causal work is even",
        minutes=4,
        difficulty=1,
        source="solutions:zigzag",
        imports=_TORCH,
        hints=(
            "Cut the sequence into 2n chunks. The rank with the chunk of least work should also get that of most work.",
            "Chunk c is positions c * size to (c + 1) * size, with size = length / 2n.",
            "Rank r holds chunk r, and behind it chunk 2n - 1 - r: torch.cat of two calls of torch.arange.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="11.ring",
        title="causal attention round a ring of ranks",
        minutes=20,
        difficulty=3,
        source="solutions:ring_attend",
        imports=_RANKS,
        hints=(
            "n steps: attend to the keys that you hold, then hand them to rank + 1 and take those of rank - 1.",
            "After k hops you hold the keys of rank - k: positions[rank][:, None] >= positions[(rank - k) % n] is "
            "what may be seen. A row with nothing visible has log_sum -inf; its weights must become 0, not NaN.",
            "Each step but the first: isend what is held, recv into a new tensor, wait. Scores, mask with -inf, "
            "log_sum = logsumexp, weights = exp(scores - log_sum, with log_sum clamped to a finite number). Merge.",
        ),
    ),
    Exercise(
        name="11.route",
        title="top-k experts of each token, within capacity",
        minutes=10,
        difficulty=2,
        source="solutions:route",
        imports=("import torch", "import torch.nn.functional as F", "from torch import Tensor"),
        hints=(
            "torch.topk gives weights and experts. For each choice: how many choices before it ask the same expert?",
            "Put the choices in the order in which they count: experts.T.reshape(-1) is all first ones, then all "
            "second ones. F.one_hot(...).cumsum(0) counts how often each expert has been asked so far.",
            "place = that cumsum, read (gather) at each choice's own expert; kept = place <= capacity, back in the "
            "shape [K, T], transposed. Dropped is the number of choices that are not kept.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="11.ask",
        title="tokens to their experts and back",
        minutes=12,
        difficulty=3,
        source="solutions:ask_experts",
        imports=(
            "import torch",
            "import torch.distributed as dist",
            "from torch import Tensor, nn",
            "from distlab.expert_parallel.exchange import exchange_rows",
        ),
        hints=(
            "Sort tokens by expert: then what goes to one rank lies together. Ranks must hear how many rows will come.",
            "give = bincount of experts; dist.all_to_all_single(take, give) tells each rank what it will get. Then "
            "exchange_rows there, the expert, exchange_rows back with the two counts swapped.",
            "Answers come back in the order in which tokens left: answers[order.argsort()] undoes tokens[order]. "
            "Multiply by weights[:, None].",
        ),
    ),
    Exercise(
        name="11.balance",
        title="a loss that is 1 where experts are asked evenly",
        minutes=6,
        difficulty=1,
        source="solutions:balance_loss",
        imports=_TORCH,
        hints=(
            "Two numbers per expert: how often it was chosen, and how probable it was on average.",
            "f: torch.bincount (minlength!) of choices, over their number. P: the mean of probabilities over tokens.",
            "Return the number of experts times the sum of f times P; counts have no gradient, P has.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="11.repair",
        title="spot the bug: experts that become alike",
        minutes=6,
        difficulty=2,
        source="solutions:synchronize",
        imports=("import torch.distributed as dist", "from torch import nn"),
        hints=(
            "What lies at the same place of `experts` on a different rank?",
            "Whose tokens came to this rank's expert? And in which loss is its gradient?",
            "All-reduce and divide what is shared. Experts: divide only, their gradients are sums over all ranks.",
        ),
        broken="averaged",
    ),
)
