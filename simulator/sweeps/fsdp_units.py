"""How many layers to gather together with FSDP? Small units hold little; large ones send few and long messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distlab.plan import Cluster, Plan, Workload
from simulator.gradients.fsdp_units import peak_gathered_elements, units_of
from simulator.memory.memory import memory_of
from simulator.step.simulate import simulate
from simulator.units import widths_of

MAX_SIZES = 24


@dataclass(frozen=True)
class UnitSweep:
    """The step of stage 3 at several numbers of layers per unit.

    Attributes:
        unit_layers: layers per unit, rising.
        num_units: units at each, the root apart.
        gathered_bytes: the most that is gathered at once.
        memory_bytes: everything that a rank holds at its peak.
        duration_s: of the step.
        exposed_s: of it, waiting for gathers and scatters.
    """

    unit_layers: tuple[int, ...]
    num_units: tuple[int, ...]
    gathered_bytes: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    duration_s: tuple[float, ...]
    exposed_s: tuple[float, ...]

    @property
    def fastest(self) -> int:
        """Index of the shortest step; of several, the one that holds least."""
        return min(range(len(self.unit_layers)), key=lambda i: (self.duration_s[i], self.memory_bytes[i], i))

    @property
    def smallest(self) -> int:
        """Index of the size that holds least; of several, the fastest."""
        return min(range(len(self.unit_layers)), key=lambda i: (self.memory_bytes[i], self.duration_s[i], i))


def unit_sizes(workload: Workload) -> tuple[int, ...]:
    """Return numbers of layers per unit that make different numbers of units, from one layer to all blocks in one."""
    blocks = sum(len(unit.layers) for unit in units_of(workload.layers, 1) if not unit.is_root) or 1
    sizes = sorted({-(-blocks // units) for units in range(1, blocks + 1)})
    if len(sizes) <= MAX_SIZES:
        return tuple(sizes)
    places = {round(index * (len(sizes) - 1) / (MAX_SIZES - 1)) for index in range(MAX_SIZES)}
    return tuple(sizes[place] for place in sorted(places))


def sweep_units(workload: Workload, cluster: Cluster, plan: Plan, *, sizes: Sequence[int] | None = None) -> UnitSweep:
    """Simulate the step at each number of layers per unit, and count what it holds.

    Raises:
        ValueError: sizes is empty, the plan does not shard parameters, or as `simulate`.
    """
    chosen = tuple(sorted(set(unit_sizes(workload) if sizes is None else sizes)))
    if not chosen:
        raise ValueError("sizes is empty; pass at least one number of layers per unit")
    if plan.sharding.stage != 3:
        raise ValueError(f"sharding stage is {plan.sharding.stage}; pass a plan of stage 3: it gathers units")
    each = widths_of(workload, plan).parameter
    steps = [simulate(workload, cluster, with_unit_layers(plan, size)) for size in chosen]
    units = [[time.unit for time in step.stages[0].units] for step in steps]
    ahead, reshard = plan.sharding.prefetch, plan.sharding.reshard_after_forward
    return UnitSweep(
        unit_layers=chosen,
        num_units=tuple(sum(not unit.is_root for unit in row) for row in units),
        gathered_bytes=tuple(peak_gathered_elements(row, ahead, reshard_after_forward=reshard) * each for row in units),
        memory_bytes=tuple(memory_of(workload, step.plan).max_bytes for step in steps),
        duration_s=tuple(step.duration_s for step in steps),
        exposed_s=tuple(step.exposed_communication_s for step in steps),
    )


def with_unit_layers(plan: Plan, unit_layers: int) -> Plan:
    """Return the plan with units of a different number of layers."""
    return replace(plan, sharding=replace(plan.sharding, unit_layers=unit_layers))
