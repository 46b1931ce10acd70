"""What all exports share: the record that they return, what a plan file does not say, and what tools cannot say.

What tools cannot say are rows of `limits.csv`, each a tool, a feature of plans and words. A row is a refusal ("part;
what to do") or a note. A feature is one of `features`, or one that a tool's own file adds.
"""

from __future__ import annotations

import csv
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple

from distlab.plan import AXES, Plan
from simulator.plan_file import PlanFile
from simulator.stage.modules import names_in

NAME = "plan"  # of jobs, modules and functions


class Exported(NamedTuple):
    """A file of a different tool, and what of the plan it does not hold."""

    text: str
    notes: tuple[str, ...] = ()


def as_json(config: Mapping[str, Any], notes: Sequence[str]) -> Exported:
    """Return a configuration as JSON, which is YAML too."""
    return Exported(json.dumps(config, indent=2) + "\n", tuple(notes))


@dataclass(frozen=True)
class Options:
    """What a plan file does not say.

    Attributes:
        max_norm: the gradients' global norm to clip to; None: no clipping.
        layers: name of the model's list of layers.
        script: what each rank runs, with its arguments.
        image: of the container that has it.

    Raises:
        ValueError: the norm is not positive, or there is no script or no image.
    """

    max_norm: float | None = None
    layers: str = "blocks"
    script: str = "train.py"
    image: str = "pytorch/pytorch:latest"

    def __post_init__(self) -> None:
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise ValueError(f"max_norm is {self.max_norm}; pass a positive number")
        if not self.image.strip():
            raise ValueError(f"the image is {self.image!r}; pass one, such as pytorch/pytorch:latest")
        if not self.script_words:
            raise ValueError(f"the script is {self.script!r}; pass a file and its arguments, as a shell takes them")

    @property
    def script_words(self) -> str:
        """The script and its arguments, quoted for a shell; "" where quotes do not close."""
        try:
            return shlex.join(shlex.split(self.script))
        except ValueError:
            return ""


def devices_per_node(said: PlanFile) -> int:
    """Return how many devices a node of the plan's cluster has."""
    return said.cluster.cluster(said.plan.world_size).devices_per_node


MIXED = ("bfloat16", "float32", "float32")
HALVES = ("bfloat16", "float16")
USUAL = Plan()
NOTHING: Mapping[str, bool] = MappingProxyType({})


def types_of(plan: Plan) -> tuple[str, str, str]:
    """Return the types of computing, of sums over ranks, and of kept gradients; 16 bits where the plan names none."""
    own = plan.precision
    return MIXED if own is None else (own.compute, own.reduce, own.gradients)


def has_master(plan: Plan) -> bool:
    """Return whether parameters are kept in float32 as well."""
    return plan.precision is None or plan.precision.master


def of_every_block(plan: Plan) -> bool:
    """Return whether recompute is the same in all blocks, each by itself."""
    return (plan.recompute_method, plan.recompute_layers) == ("uniform", 1)


def features(plan: Plan) -> dict[str, bool]:
    """Return what a plan has, by the names of `limits.csv`."""
    sharding, (compute, reduce, gradients) = plan.sharding, types_of(plan)
    stage, kind, of_optimizer = sharding.stage, plan.context_kind, sharding.offload == "optimizer"
    is_full, is_one = plan.recompute == "full", plan.schedule == "one_f_one_b"
    own_bytes = (plan.bucket_bytes, plan.first_bucket_bytes) != (USUAL.bucket_bytes, USUAL.first_bucket_bytes)
    return {
        "any plan": True,
        **{axis: getattr(plan, axis) > 1 for axis in AXES},
        "pipeline of 1F1B": plan.pipeline > 1 and is_one,
        "pipeline of a different schedule": plan.pipeline > 1 and not is_one,
        "stages of equal time": plan.pipeline > 1 and plan.cut == "time",
        "context by a ring": plan.context > 1 and kind == "ring",
        "context by all-to-alls": plan.context > 1 and kind == "all_to_all",
        "context by an all-gather": plan.context > 1 and kind == "all_gather",
        "context with tensor or pipeline": plan.context > 1 and (plan.tensor > 1 or plan.pipeline > 1),
        "sequence_parallel": plan.sequence_parallel,
        **{f"stage {number}": stage == number for number in (1, 2, 3)},
        "stage 0 with context": stage == 0 and plan.context > 1,
        "stage 3 with tensor": stage == 3 and plan.tensor > 1,
        "stage 2 or 3 with a pipeline": stage >= 2 and plan.pipeline > 1,
        "tensor or context below stage 2": stage < 2 and (plan.tensor > 1 or plan.context > 1),
        "stage 3 that keeps parameters after forward": stage == 3 and not sharding.reshard_after_forward,
        "units of its own": stage == 3 and (sharding.unit_layers, sharding.prefetch) != (1, 1),
        "nothing ahead from stage 2 on": stage >= 2 and sharding.prefetch == 0,
        "replicas of shards": sharding.replicas > 1,
        "replicas with stage 1": stage == 1 and sharding.replicas > 1,
        "offload of all": sharding.offload == "all",
        "offload of the optimizer": of_optimizer,
        "offload of the optimizer below stage 2": of_optimizer and stage < 2,
        "offload of the optimizer from stage 2 on": of_optimizer and stage >= 2,
        "full recompute of every block": is_full and of_every_block(plan),
        "full recompute of some blocks": is_full and not of_every_block(plan),
        "recompute of chosen blocks": not of_every_block(plan),
        "recompute of several blocks at once": plan.recompute_method == "uniform" and plan.recompute_layers > 1,
        "recompute of every second block or so": plan.recompute_method == "every",
        "recompute that no flag says": plan.recompute != "none"
        and not (is_full and of_every_block(plan) and stage >= 2),
        "selective recompute": plan.recompute == "selective",
        "recompute by operators": plan.recompute == "operators",
        "recompute of single modules": bool(names_in(plan)),
        "float8": plan.float8 != "none",
        "float16": compute == "float16",
        "float64": compute == "float64",
        "16 bits without a master": compute in HALVES and not has_master(plan),
        "16 bits, gradients not in float32": compute in HALVES and has_master(plan) and gradients != "float32",
        "no float32 at all": compute != "float32" and not has_master(plan),
        "gradients of a third type": gradients not in ("float32", compute),
        "sums not in float32": reduce != "float32",
        "sums not in the gradients' type": reduce != gradients,
        "compression": plan.compression is not None,
        "no overlap": plan.gradient_sync != "overlapped",
        "a call for each parameter": plan.gradient_sync == "per_parameter",
        "gradients without buckets": plan.gradient_sync in ("per_parameter", "flat"),
        "buckets of its own": own_bytes,
        "a first bucket of its own": plan.first_bucket_bytes != plan.bucket_bytes,
        "micro-batches without DeepSpeed": plan.num_microbatches > 1 and stage != 1,
    }


def order_is_usual(said: PlanFile) -> bool:
    """Return whether the axes that have several ranks lie as they do by default."""
    wide = [axis for axis in said.order if getattr(said.plan, axis) > 1]
    return wide == [axis for axis in AXES if axis in wide]


def refuse(tool: str, name: str, said: PlanFile, has: Mapping[str, bool] = NOTHING, **values: Any) -> None:
    """Refuse a plan for the first part that a tool cannot express.

    Args:
        tool: as the rows call it.
        name: as its users do.
        said: the plan.
        has: features that the tool's own file knows of.
        values: that words may have, beside those of the plan.

    Raises:
        ValueError: naming tool, part and remedy in one line.
    """
    own = {"an order of its own": not order_is_usual(said), **has}
    for words in _words(tool, "refused", said.plan, own, order=list(said.order), **values):
        raise ValueError(f"{name} cannot express {words}")


def notes(tool: str, plan: Plan, has: Mapping[str, bool] = NOTHING, **values: Any) -> tuple[str, ...]:
    """Return what a tool does otherwise, or leaves to be done in code."""
    return tuple(_words(tool, "note", plan, has, **values))


def _words(tool: str, kind: str, plan: Plan, has: Mapping[str, bool], **values: Any) -> Iterator[str]:
    known, (compute, reduce, gradients) = {**features(plan), **has}, types_of(plan)
    own = {"plan": plan, "sharding": plan.sharding, "compute": compute, "reduce": reduce, "gradients": gradients}
    for row in _rows():
        if (row["tool"], row["as"]) == (tool, kind) and known[row["where a plan has"]]:
            yield row["words"].format(**own, **values)


@cache
def _rows() -> tuple[Mapping[str, str], ...]:
    text = resources.files("simulator.export").joinpath("limits.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))
