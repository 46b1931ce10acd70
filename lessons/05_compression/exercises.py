"""Exercises of lesson 5; `checks/` says how each is driven and judged, and what wrong versions it must reject."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Compression"
MINUTES = 90
NEEDS = ("01", "02", "03")
AIMS = (
    "Send less of a gradient in five ways: the largest elements, random ones, few bits, signs, thin factors.",
    "Keep what was not sent in an error memory, and show what happens to the loss without it.",
    "Count what is really saved, by method and by number of ranks, and check it against the recorder.",
    "Synchronise every H steps in place of each one (local SGD, DiLoCo), and say what that costs.",
    "Decide for a model, a wire and a compressor whether it pays, by simulation and by a run on a slow wire.",
)

_TORCH = ("import torch", "import torch.distributed as dist", "from torch import Tensor")
_BITS = (*_TORCH, "from distlab.compression import pack_bits, unpack_bits")

EXERCISES = (
    Exercise(
        name="05.top_k",
        title="the largest elements, by all-gather",
        minutes=10,
        difficulty=2,
        source="solutions:average_top_k",
        imports=_TORCH,
        hints=(
            "`gradient.abs().topk(k).indices` are the places, `gradient[indices]` the values. Each rank has other "
            "places, so the values cannot be summed on the way.",
            "`dist.all_gather(list, tensor)` fills a list of one tensor per rank. Places fit into `torch.int32`.",
            "Gather places and values. Begin with zeros; for each rank `total.index_add_(0, places, values)`, which "
            "adds where two ranks chose the same. Divide by the number of ranks.",
        ),
    ),
    Exercise(
        name="05.random_k",
        title="random elements, the same on all ranks",
        minutes=6,
        difficulty=1,
        source="solutions:average_random_k",
        imports=_TORCH,
        hints=(
            "Two generators with the same seed draw the same numbers: `torch.Generator().manual_seed(step)`.",
            "`torch.randperm(L, generator=...)[:k]` are k different places. All ranks have the same, so all_reduce can "
            "sum the values.",
            "Draw the places, take the values there, divide by the number of ranks, all_reduce, and put them times L/k "
            "into zeros at those places.",
        ),
    ),
    Exercise(
        name="05.quantize",
        title="few bits per element",
        minutes=10,
        difficulty=2,
        source="solutions:average_quantized",
        imports=_BITS,
        hints=(
            "low = min, step = (max - low) / (2**bits - 1). The code of x is round((x - low) / step); step can be 0.",
            "One message: `torch.stack([low, step]).view(torch.uint8)` are 8 bytes; `torch.cat` them with "
            "`pack_bits(codes.to(torch.uint8), bits)`.",
            "all_gather the messages. Of each: `theirs[:8].view(torch.float32)` are its low and step, "
            "`unpack_bits(theirs[8:], bits, L)` its codes; add low + step * codes. Divide by the number of ranks.",
        ),
    ),
    Exercise(
        name="05.repair",
        title="spot the bug: one bit per element",
        minutes=8,
        difficulty=2,
        source="solutions:average_signs",
        imports=_BITS,
        hints=(
            "Print `ones` and `signs` of a few elements, one positive and one negative.",
            "What type has `ones`? Which numbers can a tensor of that type hold?",
            "`2 * 0 - 1` in unsigned bytes is 255. Turn `ones` into the gradient's dtype first.",
        ),
        broken="unsigned bytes",
    ),
    Exercise(
        name="05.feedback",
        title="remember what was not sent",
        minutes=7,
        difficulty=2,
        source="solutions:average_with_memory",
        imports=("from collections.abc import Callable", *_TORCH),
        hints=(
            "A rank wants to send gradient + memory. What it did not send is this minus what compress gave.",
            "The caller keeps `memory` for the next step, so write into it: `memory.copy_(...)`.",
            "wanted = gradient + memory; sent = compress(wanted); the memory takes wanted - sent, its own rest; then "
            "divide sent by the number of ranks and all_reduce it.",
        ),
    ),
    Exercise(
        name="05.powersgd",
        title="two thin factors",
        minutes=10,
        difficulty=3,
        source="solutions:average_low_rank",
        imports=_TORCH,
        hints=(
            "The mean of the ranks' `gradient @ q` is `mean @ q`: a matrix product is linear, so sums pass through it.",
            "`torch.linalg.qr(p).Q` has orthonormal columns that span the same. All ranks must do it to one p.",
            "p = gradient @ q, all_reduce to the mean, Q of its qr; then q = gradient.T @ p, all_reduce to the mean. "
            "Return p @ q.T and the new q.",
        ),
    ),
    Exercise(
        name="05.outer",
        title="the outer step",
        minutes=10,
        difficulty=2,
        source="solutions:outer_step",
        imports=_TORCH,
        hints=(
            "The mean change is `agreed - own`, divided by the number of ranks and all-reduced. If a replica has gone "
            "downhill, the change points uphill, as a gradient does.",
            "The caller keeps all three: write into them, by `momentum.mul_(...)`, `agreed.sub_(...)`, `own.copy_()`.",
            "First `momentum.mul_(factor).add_(change)`, then `agreed.sub_(lr * (change + factor * momentum))`.",
        ),
    ),
)
