"""What all exports share: the record that they return, and the one line that refuses a plan and names its part."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distlab.plan import AXES, Plan
from simulator.plan_file import PlanFile

NAME = "plan"  # of jobs, modules and functions
MIXED = ("bfloat16", "float32", "float32")


class Exported(NamedTuple):
    """A file of another tool, and what of the plan it does not hold."""

    text: str
    notes: tuple[str, ...] = ()


def as_json(config: Mapping[str, Any], notes: Sequence[str]) -> Exported:
    """Return a configuration as JSON, which is YAML too."""
    return Exported(json.dumps(config, indent=2) + "\n", tuple(notes))


@dataclass(frozen=True)
class Wish:
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


PLAIN = Wish()


def refuse(tool: str, *wrong: tuple[bool, str, str]) -> None:
    """Refuse a plan for the first part that is wrong: (whether it is, the part, what to do).

    Raises:
        ValueError: naming tool, part and remedy in one line.
    """
    for is_wrong, part, remedy in wrong:
        if is_wrong:
            raise ValueError(f"{tool} cannot express {part}; {remedy}")


def order_is_usual(said: PlanFile) -> bool:
    """Return whether the axes that have several ranks lie as they do by default."""
    wide = [axis for axis in said.order if getattr(said.plan, axis) > 1]
    return wide == [axis for axis in AXES if axis in wide]


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


def devices_per_node(said: PlanFile) -> int:
    """Return how many devices a node of the plan's cluster has."""
    return said.cluster.cluster(said.plan.world_size).devices_per_node


def bucket_notes(plan: Plan, tool: str) -> list[str]:
    """Say which choices about buckets of gradients a tool that has its own does not take."""
    notes = []
    if plan.gradient_sync != "overlapped":
        notes.append(f"gradient_sync={plan.gradient_sync!r}: {tool} overlaps gradients with backward")
    if plan.bucket_bytes != Plan().bucket_bytes or plan.first_bucket_bytes != Plan().first_bucket_bytes:
        notes.append(f"bucket_bytes: {tool} chooses its own")
    return notes
