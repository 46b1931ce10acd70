"""What all exports share: the record that they return, what a plan file does not say, and what tools cannot say.

What tools cannot say are rows of `limits.csv`, each a tool, a feature of plans and words. A row is a refusal ("part;
what to do") or a note. A feature is one of `features`, or one that a tool's own file adds.
"""

from __future__ import annotations

import csv
import json
import math
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
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
FEATURES = tomllib.loads(Path(__file__).with_name("features.toml").read_text("utf-8"))
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
    """Return what a plan has, by the names of `limits.csv`: see `features.toml`."""
    sharding, (compute, reduce, gradients) = plan.sharding, types_of(plan)
    parts: dict[str, Any] = {each.name: getattr(plan, each.name) for each in fields(plan)}
    parts |= {each.name: getattr(sharding, each.name) for each in fields(sharding)}
    parts |= {"compute": compute, "reduce": reduce, "gradients": gradients, "master": has_master(plan)}
    is_usual, first = of_every_block(plan), plan.first_bucket_bytes
    parts |= {
        "tensor x pipeline": plan.tensor * plan.pipeline,
        "tensor x context": plan.tensor * plan.context,
        "units and prefetch": [sharding.unit_layers, sharding.prefetch],
        "every block": is_usual,
        "flag of recompute": plan.recompute == "full" and is_usual and sharding.stage >= 2,
        "gradients as computed": gradients == compute,
        "sums as gradients": reduce == gradients,
        "is compressed": plan.compression is not None,
        "usual buckets": (plan.bucket_bytes, first) == (USUAL.bucket_bytes, USUAL.first_bucket_bytes),
        "equal buckets": first == plan.bucket_bytes,
        "has modules": bool(names_in(plan)),
    }
    told = {name: all(_is(parts[part], said) for part, said in row.items()) for name, row in FEATURES.items()}
    return {axis: getattr(plan, axis) > 1 for axis in AXES} | told


def _is(value: Any, said: Any) -> bool:
    """Return whether a part of a plan is what a row of `features.toml` says of it."""
    if isinstance(said, dict):
        return bool(value >= said["least"] if "least" in said else value != said["not"])
    return bool(value in said if isinstance(said, list) else value == said)


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
