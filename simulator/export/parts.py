"""What all exports share: the record that they return, and what a plan file does not say."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from simulator.plan_file import PlanFile

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
