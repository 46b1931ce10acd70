"""Counts of bytes: model states under several plans, and the activations of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from distlab.course.grading.cases import Cases
from distlab.grading import Evidence, Mutant
from distlab.plan import Plan, Precision, Sharding

KINDS = ("parameters", "gradients", "optimizer", "master weights")
BF16, BF16_GRADIENTS = Precision("bfloat16"), Precision("bfloat16", gradients="bfloat16")


class StateCase(NamedTuple):
    """A model and a plan, and what it is about."""

    words: str
    num_parameters: int
    plan: Plan
    numbers: int


STATE_CASES = (
    StateCase("no precision given (float32) and Adam", 1000, Plan(), 2),
    StateCase("float32 and Adam", 1000, Plan(precision=Precision()), 2),
    StateCase("bfloat16 with gradients in float32", 1000, Plan(precision=BF16), 2),
    StateCase("bfloat16 with gradients in bfloat16", 1000, Plan(precision=BF16_GRADIENTS), 2),
    StateCase("bfloat16 without a float32 copy", 1000, Plan(precision=Precision("bfloat16", master=False)), 2),
    StateCase("SGD with momentum", 1000, Plan(precision=Precision()), 1),
    StateCase("4 ranks, nothing sharded", 1000, Plan(4, precision=BF16_GRADIENTS), 2),
    StateCase("4 ranks, stage 1", 1000, Plan(4, precision=BF16_GRADIENTS, sharding=Sharding(1)), 2),
    StateCase("4 ranks, stage 2", 1000, Plan(4, precision=BF16_GRADIENTS, sharding=Sharding(2)), 2),
    StateCase("4 ranks, stage 3", 1000, Plan(4, precision=BF16_GRADIENTS, sharding=Sharding(3)), 2),
    StateCase("1,001 parameters on 4 ranks, stage 3", 1001, Plan(4, precision=BF16, sharding=Sharding(3)), 2),
    StateCase("8 ranks, two replicas, stage 3", 1000, Plan(8, precision=BF16, sharding=Sharding(3, replicas=2)), 2),
)
PLAIN = {"hidden": 64, "heads": 4, "sequence": 96, "microbatch": 3}
SPLIT = PLAIN | {"tensor": 4}
ACTIVATION_CASES: dict[str, dict[str, Any]] = {
    "one rank": PLAIN,
    "one rank, recompute 'selective'": PLAIN | {"recompute": "selective"},
    "one rank, recompute 'full'": PLAIN | {"recompute": "full"},
    "tensor 4": SPLIT,
    "tensor 4, sequence parallel": SPLIT | {"sequence_parallel": True},
    "tensor 4, recompute 'selective'": SPLIT | {"recompute": "selective"},
    "tensor 4, recompute 'full'": SPLIT | {"recompute": "full"},
    "tensor 4, sequence parallel, recompute 'full'": SPLIT | {"sequence_parallel": True, "recompute": "full"},
    "tensor 2, a longer sequence": {"hidden": 32, "heads": 8, "sequence": 160, "microbatch": 5, "tensor": 2},
}


def _use_states(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Name each kind of state, and its bytes."""
    held = fn(*arguments)
    if not isinstance(held, dict):
        return held
    return {"the kinds": ", ".join(sorted(map(str, held)))} | {f"bytes of {kind}": held.get(kind) for kind in KINDS}


def _use_activations(fn: Callable[..., float], terms: dict[str, Any]) -> Any:
    """Give what has a name by its name; count in units of s B h bytes."""
    named = dict(terms)
    kept = fn(named.pop("hidden"), named.pop("heads"), **named)
    if isinstance(kept, bool) or not isinstance(kept, int | float):
        return kept
    return {"units of s B h bytes": kept / (terms["hidden"] * terms["sequence"] * terms["microbatch"])}


drive_states = Cases({case.words: (case.num_parameters, case.plan, case.numbers) for case in STATE_CASES}, _use_states)
drive_activations = Cases({words: (terms,) for words, terms in ACTIVATION_CASES.items()}, _use_activations)


def budget_states(evidence: Evidence) -> list[str]:
    """Say what a parameter costs."""
    mixed = evidence.results[0][STATE_CASES[2].words]["result"]
    total = sum(mixed[f"bytes of {kind}"] for kind in KINDS)
    return [f"mixed precision and Adam: {total / STATE_CASES[2].num_parameters:.0f} bytes each"]


def budget_activations(evidence: Evidence) -> list[str]:
    """Say what recompute saves in the first case."""
    found = (made["result"]["units of s B h bytes"] for made in evidence.results[0].values())
    kept, selective, full = list(found)[:3]
    return [f"recompute keeps {selective / kept:.0%} (selective) or {full / kept:.0%} (full) of a layer's activations"]


_ELEMENTS = "num_parameters // plan.sharding.num_shards(plan.data)"
_SHARD = f"-(-{_ELEMENTS})"
_BYTES = "size * (shard if stage >= sharded_from else num_parameters)"
_COPY, _HALF = (f"{size} if precision.has_master_weights else 0" for size in ("4", "DTYPE_BYTES[precision.compute]"))
WRONG_STATES = (
    Mutant(
        "inference",
        "kinds",
        "it holds the parameters alone: training holds parameters, gradients, optimizer and master weights, a number "
        "of bytes for each, 0 where there is none",
        1,
        "popular claim",
    ).edit("rows.items()", "list(rows.items())[:1]"),
    Mutant(
        "copy of float32",
        "counted twice",
        "it counts a copy that is not kept: parameters in float32 need no second copy, and a plan may ask for none; "
        "ask has_master_weights",
        1,
    ).edit(_COPY, "4"),
    Mutant(
        "copy of all in 16 bits", "no copy asked", "this plan keeps no float32 copy; ask has_master_weights", 1
    ).edit(_COPY, "4 if DTYPE_BYTES[precision.compute] == 2 else 0"),
    Mutant(
        "no float32 copy",
        "copy forgotten",
        "16-bit parameters lose small updates, so a float32 copy is kept too",
        1,
        "popular claim",
    ).edit(_COPY, "0"),
    Mutant(
        "one type for all", "type of gradients", "gradients have a type of their own, plan.precision.gradients", 1
    ).edit("precision.gradients", "precision.compute"),
    Mutant(
        "copy in the optimizer",
        "copy in the optimizer",
        "the float32 copy is a kind of its own, 'master weights', and no part of the optimizer",
        1,
    ).edit("4 * numbers", "4 * numbers + (4 if precision.has_master_weights else 0)"),
    Mutant(
        "16-bit moments",
        "16-bit moments",
        "the optimizer's numbers are float32 whatever the parameters are",
        1,
        "popular claim",
    ).edit("4 * numbers", "DTYPE_BYTES[precision.compute] * numbers"),
    Mutant(
        "all split at stage 1",
        "sharded too early",
        "stage 1 splits optimizer and master weights alone: stage 2 is the first that splits gradients, stage 3 is "
        "the first that splits parameters",
        1,
        "popular claim",
    ).edit("stage >= sharded_from", "stage >= 1"),
    Mutant(
        "that kind alone", "one kind alone", "a stage splits what the stages below it split, too: stage >= 1, 2, 3", 1
    ).edit("stage >= sharded_from", "stage == sharded_from"),
    Mutant(
        "never split",
        "nothing sharded",
        "the plan's stage says which kinds are split over the ranks: multiply their bytes by the shard",
        1,
    ).edit(_BYTES, "size * num_parameters"),
    *(
        Mutant(name, name, says, 1).edit(old, new)
        for name, says, old, new in (
            ("always Adam", "the optimizer keeps `numbers` per parameter, not always Adam's two", "4 * numbers", "8"),
            ("16-bit copy", "master weights are float32, 4 bytes each", _COPY, _HALF),
            ("parameters at 2", "stage 2 leaves parameters whole; stage 3 splits them", "compute], 3)", "compute], 2)"),
            ("gradients whole", "stage 2 splits gradients over the ranks", "gradients], 2)", "gradients], 3)"),
            ("copy whole", "stage 1 splits master weights over the ranks", "else 0, 1)", "else 0, 9)"),
        )
    ),
    Mutant("rounded down", "rounded down", "no rank holds the last elements; round a shard up", 1).edit(
        _SHARD, _ELEMENTS
    ),
    Mutant(
        "rounded bytes",
        "rounded bytes",
        "it rounds bytes: round the elements of a shard up, then multiply by their bytes",
        1,
    ).edit(_BYTES, f"-(-size * {_ELEMENTS}) if stage >= sharded_from else size * num_parameters"),
    Mutant(
        "split over replicas",
        "replicas ignored",
        "each replica holds a full set of shards, so plan.sharding.num_shards(plan.data) ranks split it, not all ranks",
        1,
    ).edit("plan.sharding.num_shards(plan.data)", "plan.data"),
)
WRONG_ACTIVATIONS = (
    Mutant(
        "34 under recompute",
        "recompute keeps too much",
        "full recompute keeps the layer's input alone, 2 bytes per element, and makes the rest again in backward",
        1,
        "public calculator",
    ).edit("whole, split = 2.0, 0.0", "split = 24.0"),
    Mutant(
        "recompute ignored",
        "recompute ignored",
        "recompute 'full' keeps the layer's input alone, 2 bytes per element, and 'selective' keeps no scores",
        1,
    )
    .edit("split = 24.0", "pass")
    .edit("whole, split = 2.0, 0.0", "pass"),
    Mutant(
        "sequence parallel assumed",
        "sequence parallel assumed",
        "10 of the 34 units are split by sequence parallelism only, which is off here",
        1,
        "Megatron-LM's estimator",
    ).edit("(tensor if sequence_parallel else 1)", "tensor"),
    Mutant(
        "sequence parallel ignored",
        "10 not split",
        "sequence parallelism splits the 10 units too, and the 2 of full recompute",
        1,
    ).edit("(tensor if sequence_parallel else 1)", "1"),
    Mutant("24 whole", "24 not split", "tensor-parallel ranks split 24 of the 34 units, not the scores alone", 1)
    .edit("split = 10.0, 24 + 5", "split = 10.0, 24 * tensor + 5")
    .edit("split = 24.0", "split = 24.0 * tensor"),
    Mutant("not split", "not split", "tensor-parallel ranks split 24 of the 34 units and the scores", 1).edit(
        "+ split / tensor", "+ split"
    ),
    Mutant("no scores", "scores forgotten", "it lacks the attention scores, 5 a s / h units", 1).without(
        " + 5 * heads * sequence / hidden"
    ),
    Mutant(
        "scores of all heads", "scores whole", "a rank has a share of the heads, so it has a share of the scores", 1
    ).edit("5 * heads", "5 * tensor * heads"),
    Mutant(
        "scores once per position",
        "scores too large",
        "its scores do not grow with the square of the sequence: each position looks at each, 5 a s / h units",
        1,
    ).edit("heads * sequence / hidden", "heads"),
    Mutant(
        "elements",
        "elements",
        "it counts elements: a 16-bit number has 2 bytes, so the layer's input has 2 bytes per element too",
        1,
    ).edit("return unit", "return unit / 2"),
    Mutant("twice 2 bytes", "counted twice", "it is double: the 34 and the 5 are bytes already, not elements", 1).edit(
        "return unit", "return unit * 2"
    ),
    Mutant("one sample", "one sample", "it is for one sample, and a micro-batch has several: multiply by it", 1).edit(
        "sequence * microbatch * hidden", "sequence * hidden"
    ),
    Mutant(
        "selective keeps", "scores kept", "selective recompute drops the scores, 5 a s / h units, and keeps the rest", 1
    ).edit("split = 24.0", "pass"),
    Mutant(
        "selective drops all", "dropped too much", "selective recompute drops the scores alone; the 24 units stay", 1
    ).edit("split = 24.0", "split = 0.0"),
    Mutant("2 not split", "2 not split", "sequence parallelism splits the 2 units of full recompute, too", 1).edit(
        "whole, split = 2.0, 0.0", "return 2.0 * unit"
    ),
    Mutant(
        "input split", "input split", "tensor-parallel ranks each hold the whole input, unless in sequence parallel", 1
    ).edit("2.0, 0.0", "0.0, 2.0"),
    Mutant(
        "turned scores", "turned scores", "it has hidden / sequence where sequence / hidden belongs, in the scores", 1
    ).edit("heads * sequence / hidden", "heads * hidden / sequence"),
)
