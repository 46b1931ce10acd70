"""Why a plan is the best: what the best plan without each of its parts takes, and the rule of thumb that it shows.

The strategy map has the fastest plan that fits for each model and each number of devices, and what it is called.
"""

from __future__ import annotations

import heapq
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan import Cluster, Plan
from distlab.plan.sharding import OFFLOADS
from simulator.advisor.question import Candidates, Question, Shape
from simulator.advisor.search import COUNTED, Choice, Search, search
from simulator.models.description import ModelDescription
from simulator.units import counted, format_bytes, format_s

RULES = tomllib.loads(Path(__file__).with_name("rules.toml").read_text("utf-8"))
MOST_TRIED = 30  # steps to simulate for one reason
CLEAR = 0.08  # how much longer a bound must be to say enough: steps like published ones are so near, 9 in 10


class Reason(NamedTuple):
    """One part of a plan, what the best plan without it takes, and the rule that it shows."""

    part: str
    instead: str
    rule: str


def columns_of(found: Candidates) -> dict[str, NDArray[np.generic]]:
    """Return each part of a plan as a column: its degree, or whether it is there."""
    shapes = {name: np.array([getattr(shape, name) for shape in found.shapes]) for name in found.shapes[0]._fields}
    own = {"data": found.data, "pipeline": found.pipeline, "stages_per_rank": found.per_rank}
    own |= {"sharding": found.sharding, "offload": np.array(OFFLOADS)[found.offload]}
    return own | {name: column[found.shape] for name, column in shapes.items()}


def reasons(search: Search, best: Choice) -> list[Reason]:
    """Return a reason for each part of the best plan.

    The plans without a part are first bounded from below: where no such plan can be as fast, nothing is simulated.
    """
    plan, columns = best.plan, columns_of(search.found)
    if plan.world_size == 1 and plan.sharding.offload == "none":
        return [Reason("one device", "", RULES["alone"])]
    plain = {"recompute": "none", "sequence_parallel": False, "sharding": 0, "offload": "none"}
    has = {name: getattr(plan, name) for name in RULES if hasattr(plan, name)}
    has |= {"sharding": plan.sharding.stage * (plan.world_size > 1), "offload": plan.sharding.offload}
    found, like = [], (search.found.offload == 0) | (plan.sharding.offload != "none")
    for name, rule in RULES.items():
        without = plain.get(name, 1)
        if name in has and has[name] != without:
            text = _instead(search, best, np.asarray(columns[name] == without) & like)
            found.append(Reason(name if has[name] is True else f"{name} = {has[name]}", text, rule))
    num, batch = plan.world_size, search.found.question.batch_size
    if batch % num:
        text = f"{num} devices do not divide it, so that not all of them can be replicas"
        found.append(Reason(f"batch = {batch}", text, RULES["batch"]))
    return found


def _instead(search: Search, best: Choice, among: NDArray[np.bool_]) -> str:
    floor = _floor_s(search, among)
    if floor == np.inf:
        return "without it nothing fits"
    if (more := floor / best.seconds - 1) > CLEAR:
        return f"without it a step takes at least {more:.0%} longer"
    before = search.num_simulated
    other = search.best(1, among=among, most=MOST_TRIED)
    is_all = search.num_simulated < before + MOST_TRIED
    if not other:
        return "without it nothing fits"
    longer = f"{other[0].seconds / best.seconds - 1:.1%} longer"
    return f"without it a step takes {longer}" if is_all else f"without it a step takes at most {longer}"


def _floor_s(search: Search, among: NDArray[np.bool_]) -> float:
    """Return what no step of these rows that fit is below."""
    rows = np.flatnonzero(among)
    heap = [(bound, False, row) for row, bound in zip(rows.tolist(), search.found.bound_s[rows].tolist(), strict=True)]
    heapq.heapify(heap)
    while heap:
        bound, is_tight, row = heapq.heappop(heap)
        if is_tight and search.memory(row).fits(search.found.question.device):
            return float(bound)
        if not is_tight and search.may_fit(row):
            heapq.heappush(heap, (max(bound, search.tight_s(row)), True, row))
    return np.inf


def near_fit(search: Search) -> str:
    """Return which faster plan lacks least memory, in words; "": all that could be faster fit."""
    found, free = search.found, search.found.question.device.memory_bytes
    needs = {row: search.memory(row).max_bytes for row in search.too_large()[:COUNTED]}
    row = min((row for row in needs if free < needs[row] <= 2 * free), key=lambda row: needs[row], default=None)
    if row is None:  # none is near
        return ""
    words = words_of(found.plan(row), found.workload(row).samples)
    lacks = f"{format_bytes(free)} that a device has for it, {needs[row] / free - 1:.1%} too much"
    return (
        f"{words} needs {format_bytes(needs[row])} of the {lacks}; it could take {format_s(float(found.bound_s[row]))}"
    )


def words_of(plan: Plan, microbatch: int) -> str:
    """Return a plan in one line."""
    names = ("data", "pipeline", "tensor", "context", "expert")
    parts = [f"{name} {getattr(plan, name)}" for name in names if getattr(plan, name) > 1] or ["one device"]
    if plan.stages_per_rank > 1:
        parts.append(f"{plan.stages_per_rank} stages per rank")
    parts.append(f"{counted(plan.num_microbatches, 'micro-batch')} of {microbatch}")
    if plan.sharding.stage:
        parts.append(f"sharding {plan.sharding.stage}")
    if plan.sharding.offload != "none":
        parts.append({"optimizer": "optimizer", "all": "all states"}[plan.sharding.offload] + " on the host")
    if plan.offload_activations:
        parts.append("activations on the host")
    if plan.recompute != "none":
        name = "per-operator" if plan.recompute == "operators" else plan.recompute
        some = f" of one of {plan.recompute_layers} blocks" if plan.recompute_layers > 1 else ""
        parts.append(f"{name} recompute{some}")
    if plan.sequence_parallel:
        parts.append("sequence parallel")
    return ", ".join(parts)


STRATEGIES = ("one device", "data", "ZeRO-1", "ZeRO-2", "FSDP", "tensor", "pipeline", "tensor and pipeline")
MICROBATCHES = (1, 2, 4)
MOST_SIMULATED = 256


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
