"""Drag the size of a unit: memory against exposed communication, and the step that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ipywidgets as widgets
from matplotlib.figure import Figure

from distlab.plan import Cluster, Plan, Sharding, Workload
from simulator.hardware.presets import cluster as cluster_by_name
from simulator.models.by_name import model_by_name
from simulator.step.simulate import simulate
from simulator.sweeps.fsdp_units import UnitSweep, sweep_units, unit_sizes, with_unit_layers
from simulator.viz.drawing.panel import Panel
from simulator.viz.sharding.unit_size import describe_sharding, draw_sharding

MODEL, CLUSTER, MAX_PREFETCH = "llama-2-7b", "dgx-h100", 3
NUM_DEVICES = (8, 16, 32, 64)
ALL, NODE = "over all GPUs", "inside each node"


def sharding_panel(
    workload: Workload | None = None,
    cluster: Cluster | None = None,
    plan: Plan | None = None,
    *,
    num_devices: Sequence[int] = NUM_DEVICES,
) -> Panel:
    """Return a panel with a slider of layers a unit, and controls of prefetch, GPUs, sets of shards and what is kept.

    In code: `panel.controls["unit_layers"].value = 4`, `panel.controls["prefetch"].value = 0`,
    `panel.controls["sets"].value = "inside each node"`.

    Args:
        workload: the model; a Llama 2 of 7 billion parameters by default, in 16 bits.
        cluster: what it runs on; its devices may be more or fewer than it has. By default H100s in nodes of eight.
        plan: all that the controls do not set; by default layers are computed again in backward.
        num_devices: numbers of GPUs to choose from.

    Raises:
        ValueError: as `sweep_units`.
    """
    model = model_by_name(MODEL, microbatch_size=1) if workload is None else workload
    machine = cluster_by_name(CLUSTER, max(num_devices)) if cluster is None else cluster
    base = Plan(data=1, sharding=Sharding(3), recompute="full") if plan is None else plan
    sizes = unit_sizes(model)
    sweeps: dict[tuple[Cluster, Plan], UnitSweep] = {}

    def draw(unit_layers: int, prefetch: int, gpus: int, sets: str, keep: bool) -> tuple[Figure, str]:
        on = replace(machine, num_devices=gpus)
        replicas = max(1, gpus // machine.devices_per_node) if sets == NODE else 1
        sharding = replace(
            base.sharding, stage=3, unit_layers=1, prefetch=prefetch, replicas=replicas, reshard_after_forward=not keep
        )
        chosen = replace(base, data=gpus, sharding=sharding)
        if (on, chosen) not in sweeps:
            sweeps[on, chosen] = sweep_units(model, on, chosen, sizes=sizes)
        sweep, step = sweeps[on, chosen], simulate(model, on, with_unit_layers(chosen, unit_layers))
        return draw_sharding(sweep, step), describe_sharding(sweep, step)

    return Panel(
        draw,
        unit_layers=widgets.SelectionSlider(
            options=list(sizes),
            value=min(sizes, key=lambda s: abs(s - base.sharding.unit_layers)),
            description="layers a unit",
        ),
        prefetch=widgets.IntSlider(value=min(base.sharding.prefetch, MAX_PREFETCH), min=0, max=MAX_PREFETCH),
        gpus=widgets.Dropdown(options=list(num_devices), value=num_devices[0], description="GPUs"),
        sets=widgets.Dropdown(options=[ALL, NODE], value=ALL, description="shards"),
        keep=widgets.Checkbox(
            value=not base.sharding.reshard_after_forward, description="keep parameters after forward"
        ),
    )
