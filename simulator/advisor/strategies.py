"""The strategy map: for each model and each number of devices the fastest plan that fits, and what it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from distlab.plan import Cluster, Plan
from simulator.advisor.question import Question, Shape
from simulator.advisor.search import Choice, search
from simulator.models.description import ModelDescription

STRATEGIES = ("one device", "data", "ZeRO-1", "ZeRO-2", "FSDP", "tensor", "pipeline", "tensor and pipeline")
MICROBATCHES = (1, 2, 4)
MOST_SIMULATED = 24


class MapCell(NamedTuple):
    """The best plan for a model on a number of devices; None: the batch does not divide, or nothing fits."""

    model: str
    num_devices: int
    choice: Choice | None

    @property
    def strategy(self) -> str:
        """One of STRATEGIES; "": there is none."""
        return "" if self.choice is None else strategy_of(self.choice.plan)


def strategy_of(plan: Plan) -> str:
    """Name a plan by how it splits a layer, then the model, then what replicas hold; replicas are in all of them."""
    if plan.world_size == 1:
        return "one device"
    if plan.tensor > 1:
        return "tensor and pipeline" if plan.pipeline > 1 else "tensor"
    return "pipeline" if plan.pipeline > 1 else STRATEGIES[1 + plan.sharding.stage]


def strategy_map(
    models: Sequence[str], cluster: Cluster, counts: Sequence[int], *, batch_size: int
) -> tuple[MapCell, ...]:
    """Return a cell for each model and number of devices, models in the outer loop.

    Searched are plans without context and expert ranks, with tensor ranks inside a node and MICROBATCHES. Of a field's
    plans the MOST_SIMULATED with the lowest bounds are simulated, and more only where none of them fits.

    Args:
        models: names of published models.
        cluster: of any number of devices.
        counts: numbers of devices.
        batch_size: samples in a step, the same in all cells.

    Raises:
        ValueError: a model is not known, or a count does not fill nodes.
    """

    def keep(shape: Shape) -> bool:
        alone = shape.context == shape.expert == 1 and shape.microbatch in MICROBATCHES
        return alone and shape.tensor <= cluster.devices_per_node and shape.sequence_parallel == (shape.tensor > 1)

    def best(model: str, count: int) -> Choice | None:
        machine = replace(cluster, num_devices=count)
        try:
            found = search(Question(described[model], machine, batch_size), keep)
        except ValueError:  # nothing divides the batch and the model
            return None
        return next(iter(found.best(1, most=MOST_SIMULATED) or found.best(1)), None)

    described = {model: ModelDescription(model=model) for model in models}
    for each in described.values():
        each.workload()  # an unknown model is refused here
    return tuple(MapCell(model, count, best(model, count)) for model in models for count in counts)
