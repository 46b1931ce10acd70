"""Whether a plan fits: model states and activations of the fullest GPU."""

from __future__ import annotations

from distlab.course.grading.cases import Cases
from distlab.grading import Evidence, Mutant
from distlab.plan import Plan, Sharding

SIZES = (70e6, 12, 512, 256)  # parameters, layers, hidden, sequence


CASES = {  # plans, by what they are about
    "one GPU": Plan(),
    "data 4, nothing sharded": Plan(data=4),
    **{f"data 4, ZeRO-{stage}": Plan(data=4, sharding=Sharding(stage)) for stage in (1, 2, 3)},
    "tensor 4": Plan(tensor=4),
    "tensor 4, sequence parallel": Plan(tensor=4, sequence_parallel=True),
    "full recompute": Plan(recompute="full"),
    "tensor 4, full recompute": Plan(tensor=4, recompute="full"),
    "tensor 4, sequence parallel, full recompute": Plan(tensor=4, sequence_parallel=True, recompute="full"),
    "pipeline 4, 16 micro-batches": Plan(pipeline=4, num_microbatches=16),
    "pipeline 4, 2 micro-batches": Plan(pipeline=4, num_microbatches=2),
    "one GPU, 8 micro-batches": Plan(num_microbatches=8),
    "data 2, tensor 2, pipeline 3, ZeRO-1, 6 micro-batches": Plan(
        data=2, tensor=2, pipeline=3, num_microbatches=6, sharding=Sharding(1)
    ),
}


drive_fits = Cases({words: (*SIZES, plan) for words, plan in CASES.items()})


def budget_fits(evidence: Evidence) -> list[str]:
    """Say what was counted."""
    found = [made["result"] for made in evidence.results[0].values()]
    one, zero_3 = found[0], found[4]
    return [f"{len(CASES)} plans; the first holds {one / 1e9:.2f} GB, with ZeRO-3 on 4 GPUs {zero_3 / 1e9:.2f} GB"]


_HELD = "min(plan.pipeline, plan.num_microbatches)"
_SHARE = "parameters / (plan.tensor * plan.pipeline)"
WRONG_FITS = (
    Mutant(
        "states alone", "no activations", "the states alone: add what the layers keep for backward", 1, "popular claim"
    ).edit("share * states + kept * sequence * hidden * layers / plan.pipeline * held", "share * states"),
    Mutant(
        "weights and gradients",
        "optimizer forgotten",
        "it lacks Adam's 12 bytes per parameter: two moments and a copy of the weights",
        1,
        "popular claim",
    ).edit("12 /", "0 /"),
    Mutant(
        "moments alone", "no float32 copy", "Adam's 12 bytes: two moments and a copy of the weights; 8 lack the copy", 1
    ).edit("12 /", "8 /"),
    Mutant(
        "gradients in 16 bits", "16-bit sums", "micro-batches' gradients are added up in float32: 4 bytes each", 1
    ).edit("+= 4 /", "+= 2 /"),
    Mutant(
        "as if data parallel", "whole model", "a rank holds a part of the model: divide by tensor x pipeline", 1
    ).edit(_SHARE, "parameters"),
    Mutant(
        "stages hold all", "stages keep all", "a stage holds its own layers: divide by the pipeline degree too", 1
    ).edit(_SHARE, "parameters / plan.tensor"),
    Mutant("layers whole", "tensor keeps all", "tensor ranks hold a part of each layer: divide by tensor too", 1).edit(
        _SHARE, "parameters / plan.pipeline"
    ),
    Mutant(
        "divided by all GPUs", "sharded without asking", "replicas hold whole states, unless sharding.stage splits", 1
    )
    .edit("stage >= 1", "stage >= 0")
    .edit("stage >= 2", "stage >= 0")
    .edit("stage >= 3", "stage >= 0"),
    Mutant(
        "ZeRO is ZeRO",
        "all at once",
        "ZeRO-1 splits the optimizer's 12 bytes alone; gradients from stage 2 on, weights from stage 3 on",
        1,
        "popular claim",
    )
    .edit("stage >= 2", "stage >= 1")
    .edit("stage >= 3", "stage >= 1"),
    Mutant(
        "sequence parallel for all",
        "sequence parallel assumed",
        "without sequence parallelism each tensor rank holds 10 of the 34 bytes, and the 2",
        1,
        "Megatron-LM's estimator",
    ).edit("plan.tensor if plan.sequence_parallel else 1", "plan.tensor"),
    Mutant(
        "recompute forgotten", "recompute ignored", "full recompute keeps 2 bytes per token and element, not 34", 1
    ).without('2 / ranks if plan.recompute == "full" else '),
    Mutant(
        "34 under recompute",
        "recompute keeps all",
        "with full recompute a layer keeps its input alone: 2 bytes, not 34",
        1,
        "public calculator",
    ).edit("2 / ranks", "34 / ranks"),
    Mutant(
        "one in flight", "one micro-batch", "the first stage holds a micro-batch for each stage, if there are many", 1
    ).edit(_HELD, "1"),
    Mutant(
        "as GPipe", "all micro-batches", "1F1B holds at most one micro-batch for each stage: then backward begins", 1
    ).edit(_HELD, "plan.num_microbatches"),
    Mutant("always p", "one for each stage", "a stage cannot hold more micro-batches than there are", 1).edit(
        _HELD, "plan.pipeline"
    ),
    Mutant(
        "layers of all stages", "all layers", "a stage keeps activations of its own layers: layers / pipeline", 1
    ).edit("layers / plan.pipeline", "layers"),
    Mutant("never sharded", "nothing sharded", "plan.sharding.stage says what is split: divide that by plan.data", 1)
    .edit("stage >= 1", "False")
    .edit("stage >= 2", "False")
    .edit("stage >= 3", "False"),
    Mutant(
        "never split", "sequence parallel ignored", "sequence-parallel ranks split the 10 bytes too, and the 2", 1
    ).edit("plan.tensor if plan.sequence_parallel else 1", "1"),
    Mutant("half of the bytes", "elements", "the 34 and the 2 are bytes already, not elements", 1).edit(
        "kept * sequence", "kept / 2 * sequence"
    ),
    Mutant("GiB", "GiB", "it counts in 2^30 bytes (GiB); bytes are asked", 1).edit(
        "return share * states + kept", "gib = 2**30\nreturn share / gib * states + kept / gib"
    ),
    Mutant("stages", "stages", "stage 1 splits the 12 bytes already: the comparisons are >=, not >", 1).edit(
        "stage >= ", "stage > ", times=3
    ),
    Mutant("2 whole", "2 not split", "sequence-parallel ranks split the 2 bytes under full recompute too", 1).edit(
        "2 / ranks", "2"
    ),
)
