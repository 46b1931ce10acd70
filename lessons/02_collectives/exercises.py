"""Exercises of lesson 2; `checks/` defines by its name how each is driven, varied and wrong on purpose."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Collectives"
MINUTES = 90
NEEDS = ("01",)
AIMS = (
    "Build ring, tree, halving-doubling and hierarchical all-reduce from send and receive.",
    "Derive the bytes and steps of each, and measure them.",
    "Predict which one wins on PCIe, NVLink, InfiniBand and Ethernet.",
)

MESSAGES = ("import torch", "import torch.distributed as dist", "from distlab.comm.p2p import Receive, Send, exchange")

EXERCISES = (
    Exercise(
        name="02.ring_reduce_scatter",
        title="The first half of the ring: every rank ends with its own chunk of the sum",
        minutes=12,
        difficulty=2,
        source="solutions:ring_reduce_scatter",
        imports=MESSAGES,
        hints=(
            "Cut the tensor with `tensor.tensor_split(n)`. In each step you send one chunk to rank + 1 and receive "
            "a different one from rank - 1, both modulo n, in one `exchange`.",
            "Think backwards. Rank r must end with chunk r, so in the last step it receives chunk r. One step earlier "
            "it received chunk r - 1 and so on. What it receives in one step, plus its own part, it sends in the next.",
            "In step s = 0 ... n-2: send chunk (rank - s - 1) % n, receive into scratch memory as long as chunk (rank "
            "- s - 2) % n, and add that to the chunk in place. Return chunks[rank].",
        ),
        timeout_s=15.0,
    ),
    Exercise(
        name="02.ring_all_gather",
        title="The second half: chunks go round once more, and every rank keeps a copy",
        minutes=6,
        difficulty=1,
        source="solutions:ring_all_gather",
        imports=MESSAGES,
        hints=(
            "The same ring and the same neighbours as before; but what arrives is finished, so it replaces what is "
            "there.",
            "A chunk is a view into the tensor: `Receive(chunks[c], ...)` puts the message where it belongs.",
            "In step s = 0 ... n-2: send chunk (rank - s) % n, which is your own in step 0 and later the one that has "
            "just come; receive into chunk (rank - s - 1) % n. Return the tensor.",
        ),
        timeout_s=15.0,
    ),
    Exercise(
        name="02.repair",
        title="Spot the bug: a relay that is right on two ranks",
        minutes=7,
        difficulty=2,
        source="solutions:relay_all_reduce",
        imports=MESSAGES,
        hints=(
            "Run it in your head on three ranks. Which tensors should pass through rank 0, and in which order?",
            "In the first step rank 0 receives rank 2's tensor. What must it send in the second step, so that rank 1 "
            "gets to see rank 2's tensor?",
            "Each step must pass on what the step before received. Two buffers swap their roles after every step: what "
            "came in goes out next. One line at the end of the loop does it.",
        ),
        timeout_s=15.0,
        broken="never passes on",
    ),
    Exercise(
        name="02.tree_broadcast",
        title="A broadcast in ceil(log2 n) steps",
        minutes=10,
        difficulty=2,
        source="solutions:tree_broadcast",
        imports=MESSAGES,
        hints=(
            "After the first step two ranks have the tensor, after the second four. Every rank that has it sends it "
            "on.",
            "Number the ranks from the root: place = (rank - root) % n. Before a step places 0 to have - 1 have the "
            "tensor; in the step place p sends to place p + have, if there is such a place.",
            "have = 1; while have < n: a place below `have` with place + have < n sends to rank (place + have + root) "
            "% n; a place from `have` to 2 have - 1 receives from rank (place - have + root) % n; then double `have`.",
        ),
        timeout_s=15.0,
        worlds=(1, 2, 3, 4, 5),
    ),
    Exercise(
        name="02.halving_doubling",
        title="As few bytes as a ring, in as few steps as a tree",
        minutes=15,
        difficulty=3,
        source="solutions:halving_doubling",
        imports=MESSAGES,
        hints=(
            "The partner in the step of distance d is rank ^ d: the same number with one binary digit turned over. The "
            "distances are n/2, n/4, ..., 1 on the way down, and back up on the way out.",
            "On the way down cut your block in two with `block.tensor_split(2)`; the lower rank of the pair keeps the "
            "first half. Send the other half, add what comes to yours, and go on with your half as the block.",
            "Keep a list of (peer, mine, theirs) on the way down. Then walk it backwards: send mine, receive into "
            "theirs. Both are views into the tensor, so at the end it is whole.",
        ),
        worlds=(1, 2, 4),
        timeout_s=15.0,
    ),
    Exercise(
        name="02.times",
        title="Predict three all-reduces from latency and bandwidth",
        minutes=8,
        difficulty=1,
        source="solutions:all_reduce_times",
        imports=("import math",),
        hints=(
            "Each time is (number of steps that follow one another) x latency_s + (bytes over the busiest link) / "
            "bytes_per_s.",
            "Ring: 2 (n-1) steps. Tree: ceil(log2 n) steps up and as many down. Halving-doubling: as many as the tree.",
            "Ring and halving-doubling carry 2 (n-1)/n of the tensor. In the tree each of the 2 ceil(log2 n) steps "
            "carries the whole tensor. `math.ceil(math.log2(n))` is the number of levels.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="02.hierarchical",
        title="Two levels: only a chunk crosses between machines",
        minutes=6,
        difficulty=2,
        source="solutions:hierarchical_all_reduce",
        imports=("import torch", "import torch.distributed as dist", "from distlab import collectives"),
        hints=(
            "You have the pieces: `collectives.ring_reduce_scatter`, `ring_all_reduce` and `ring_all_gather` all take "
            "a group as their second argument.",
            "What crosses between machines should be small. After which of the three does a rank hold a piece that is "
            "already summed over its machine?",
            "chunk = reduce-scatter of the tensor in `local`; all-reduce that chunk in `cross` (it is a view, so the "
            "tensor changes too); all-gather the tensor in `local`; return it.",
        ),
        worlds=(1, 2, 4),
        timeout_s=20.0,
    ),
)
