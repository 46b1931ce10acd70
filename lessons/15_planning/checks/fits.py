"""Whether a plan fits: model states and activations of the fullest GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from distlab_lesson_15.checks.shared import judge_slips

from distlab.grading import Evidence, Fault, Mutant
from distlab.plan import Plan, Sharding

SIZES = (70e6, 12, 512, 256)  # parameters, layers, hidden, sequence


class Case(NamedTuple):
    """A plan, and what it is about."""

    words: str
    plan: Plan


CASES = (
    Case("one GPU", Plan()),
    Case("data 4, nothing sharded", Plan(data=4)),
    *(Case(f"data 4, ZeRO-{stage}", Plan(data=4, sharding=Sharding(stage))) for stage in (1, 2, 3)),
    Case("tensor 4", Plan(tensor=4)),
    Case("tensor 4, sequence parallel", Plan(tensor=4, sequence_parallel=True)),
    Case("full recompute", Plan(recompute="full")),
    Case("tensor 4, full recompute", Plan(tensor=4, recompute="full")),
    Case("tensor 4, sequence parallel, full recompute", Plan(tensor=4, sequence_parallel=True, recompute="full")),
    Case("pipeline 4, 16 micro-batches", Plan(pipeline=4, num_microbatches=16)),
    Case("pipeline 4, 2 micro-batches", Plan(pipeline=4, num_microbatches=2)),
    Case("one GPU, 8 micro-batches", Plan(num_microbatches=8)),
    Case(
        "data 2, tensor 2, pipeline 3, ZeRO-1, 6 micro-batches",
        Plan(data=2, tensor=2, pipeline=3, num_microbatches=6, sharding=Sharding(1)),
    ),
)


def drive_fits(fn: Callable[..., Any]) -> list[Any]:
    """Ask for every plan."""
    return [fn(*SIZES, case.plan) for case in CASES]


def bytes_of(case: Case, slip: str = "") -> float:
    """Return the bytes of a plan, or what a slip makes of them."""
    parameters, layers, hidden, sequence = SIZES
    plan, stage = case.plan, case.plan.sharding.stage
    t, p, m = plan.tensor, plan.pipeline, plan.num_microbatches
    share = parameters / {"whole model": 1, "stages keep all": t, "tensor keeps all": p}.get(slip, t * p)
    first = {"sharded without asking": (0, 0, 0), "all at once": (1, 1, 1), "nothing sharded": (9, 9, 9)}
    sizes = {"optimizer forgotten": (0, 4, 2), "no float32 copy": (8, 4, 2), "16-bit sums": (12, 2, 2)}.get(
        slip, (12, 4, 2)
    )
    shards = [plan.data if stage >= least else 1 for least in first.get(slip, (1, 2, 3))]
    states = sum(size / num for size, num in zip(sizes, shards, strict=True))
    ranks = t if plan.sequence_parallel or slip == "sequence parallel assumed" else 1
    ranks = 1 if slip == "sequence parallel ignored" else ranks
    kept = 10 / ranks + 24 / t
    if plan.recompute == "full" and slip != "recompute ignored":
        kept = (34 if slip == "recompute keeps all" else 2) / ranks
    kept = kept / 2 if slip == "elements" else kept
    counts = {"one micro-batch": 1, "all micro-batches": m, "one for each stage": p}
    held = counts.get(slip, min(p, m))
    own = layers if slip == "all layers" else layers / p
    activations = 0.0 if slip == "no activations" else kept * sequence * hidden * own * held
    return share * states + activations


SLIPS = {
    "no activations": "The states alone: add what the layers keep for backward",
    "optimizer forgotten": "Adam holds 12 bytes more per parameter: two moments and a copy of the weights, in float32",
    "no float32 copy": "Adam's 12 bytes are two moments and a copy of the weights, all in float32: 8 lack the copy",
    "16-bit sums": "Gradients of several micro-batches are added up in float32: 4 bytes per parameter",
    "whole model": "Tensor and pipeline ranks hold a part of the model each: divide its parameters by both degrees",
    "stages keep all": "A stage holds its own layers: divide the parameters by the pipeline degree too",
    "tensor keeps all": "Tensor ranks hold a part of each layer: divide the parameters by the tensor degree too",
    "sharded without asking": "Replicas hold whole states unless the plan shards them: ask plan.sharding.stage",
    "all at once": "ZeRO-1 splits the optimizer's 12 bytes alone; gradients from stage 2 on, weights from stage 3 on",
    "nothing sharded": "plan.sharding.stage says what the data ranks split: divide that by plan.data",
    "sequence parallel assumed": "Without sequence parallelism each tensor rank holds 10 of the 34 bytes, and the 2",
    "sequence parallel ignored": "Sequence-parallel ranks split the 10 bytes too, and the 2 of full recompute",
    "recompute ignored": "With full recompute a layer keeps 2 bytes per token and hidden element, not 34",
    "recompute keeps all": "With full recompute a layer keeps its input alone: 2 bytes, not 34",
    "elements": "The 34 and the 2 are bytes already, not elements",
    "one micro-batch": "The first stage of 1F1B holds several micro-batches: one for each stage, if there are as many",
    "all micro-batches": "1F1B holds at most one micro-batch for each stage: then backward begins",
    "one for each stage": "A stage cannot hold more micro-batches than there are",
    "all layers": "A stage keeps the activations of its own layers: divide the layers by the pipeline degree",
}


def judge_fits(evidence: Evidence) -> Iterator[Fault]:
    """Compare every plan's bytes."""
    yield from judge_slips(evidence, CASES, bytes_of, SLIPS)


def budget_fits(evidence: Evidence) -> list[str]:
    """Say what was counted."""
    one, zero_3 = evidence.results[0][0], evidence.results[0][4]
    return [f"{len(CASES)} plans; the first holds {one / 1e9:.2f} GB, with ZeRO-3 on 4 GPUs {zero_3 / 1e9:.2f} GB"]


_HELD = "min(plan.pipeline, plan.num_microbatches)"
_SHARE = "parameters / (plan.tensor * plan.pipeline)"
WRONG_FITS = (
    Mutant("states alone", "no activations", "for backward", 1, "popular claim").edit(
        "share * states + kept * sequence * hidden * layers / plan.pipeline * held", "share * states"
    ),
    Mutant("weights and gradients", "optimizer forgotten", "12 bytes more", 1, "popular claim").edit("12 /", "0 /"),
    Mutant("moments alone", "no float32 copy", "8 lack the copy", 1).edit("12 /", "8 /"),
    Mutant("gradients in 16 bits", "16-bit sums", "added up in float32", 1).edit("+= 4 /", "+= 2 /"),
    Mutant("as if data parallel", "whole model", "by both degrees", 1).edit(_SHARE, "parameters"),
    Mutant("stages hold all", "stages keep all", "its own layers", 1).edit(_SHARE, "parameters / plan.tensor"),
    Mutant("layers whole", "tensor keeps all", "a part of each layer", 1).edit(_SHARE, "parameters / plan.pipeline"),
    Mutant("divided by all GPUs", "sharded without asking", "plan.sharding.stage", 1)
    .edit("stage >= 1", "stage >= 0")
    .edit("stage >= 2", "stage >= 0")
    .edit("stage >= 3", "stage >= 0"),
    Mutant("ZeRO is ZeRO", "all at once", "12 bytes alone", 1, "popular claim")
    .edit("stage >= 2", "stage >= 1")
    .edit("stage >= 3", "stage >= 1"),
    Mutant("sequence parallel for all", "sequence parallel assumed", "10 of the 34", 1, "Megatron-LM's estimator").edit(
        "plan.tensor if plan.sequence_parallel else 1", "plan.tensor"
    ),
    Mutant("recompute forgotten", "recompute ignored", "not 34", 1).without(
        '2 / ranks if plan.recompute == "full" else '
    ),
    Mutant("34 under recompute", "recompute keeps all", "input alone", 1, "public calculator").edit(
        "2 / ranks", "34 / ranks"
    ),
    Mutant("one in flight", "one micro-batch", "holds several", 1).edit(_HELD, "1"),
    Mutant("as GPipe", "all micro-batches", "at most one", 1).edit(_HELD, "plan.num_microbatches"),
    Mutant("always p", "one for each stage", "than there are", 1).edit(_HELD, "plan.pipeline"),
    Mutant("layers of all stages", "all layers", "its own layers", 1).edit("layers / plan.pipeline", "layers"),
)
