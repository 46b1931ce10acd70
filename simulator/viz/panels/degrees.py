"""Drag the degrees of parallelism: see what a rank holds, what each axis exposes, and how much of the peak is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from distlab.plan import AXES, Cluster, Plan, Sharding, Workload
from distlab.plan.records import RECOMPUTES
from simulator.hardware.presets import cluster as cluster_by_name
from simulator.models.by_name import model_by_name
from simulator.step.simulate import Step, simulate
from simulator.viz.mesh.degrees import degrees_figure, describe_degrees, describe_impossible, impossible_figure
from simulator.viz.panels.memory import DEGREES, STAGES
from simulator.viz.panels.panel import Panel, by_name

MODEL, CLUSTERS, NUM_DEVICES = "llama-2-7b", ("dgx-h100", "dgx-a100"), 64


def degrees_panel(
    workload: Workload | None = None,
    cluster: Cluster | Mapping[str, Cluster] | None = None,
    *,
    plan: Plan | None = None,
) -> Panel:
    """Return a panel with a slider for each degree, and controls of micro-batches, sharding, recompute and the cluster.

    In code: `panel.controls["tensor"].value = 4`, `panel.controls["recompute"].value = "full"`,
    `panel.controls["sequence_parallel"].value = True`.

    A plan that cannot run is drawn too: its equation, and in words why not.

    Args:
        workload: the model; a Llama 2 of 7 billion parameters by default, in 16 bits.
        cluster: what it runs on, or several by name; by default 64 H100s or A100s in nodes of eight.
        plan: where the controls begin, and all that they do not set.

    Raises:
        ValueError: there is no cluster, or a degree of the plan is not among the slider's: powers of two, up to the
            largest cluster's devices.
    """
    model = model_by_name(MODEL) if workload is None else workload
    presets = {name: cluster_by_name(name, NUM_DEVICES) for name in CLUSTERS}
    clusters = by_name(presets if cluster is None else cluster, "cluster")
    base = Plan(data=8, tensor=8, sequence_parallel=True, recompute="selective") if plan is None else plan
    first = next(iter(clusters))
    most = max(one.num_devices for one in clusters.values())
    choices = [degree for degree in DEGREES if degree <= most]
    for axis in AXES:
        if getattr(base, axis) not in choices:
            raise ValueError(
                f"the plan has {axis} = {getattr(base, axis)}; choose one of {', '.join(map(str, choices))}"
            )

    def draw(on: str = first, **values: Any) -> tuple[Figure, str]:
        return draw_degrees(model, clusters[on], changed_plan(base, **values))

    return Panel(draw, **degree_controls(base, choices, clusters))


def draw_degrees(workload: Workload, cluster: Cluster, plan: Plan) -> tuple[Figure, str]:
    """Draw a plan, or why it cannot run; and say the same."""
    return or_why_not(
        workload,
        cluster,
        plan,
        lambda step: (
            degrees_figure(step, num_devices=cluster.num_devices),
            describe_degrees(step, num_devices=cluster.num_devices),
        ),
    )


def or_why_not(
    workload: Workload, cluster: Cluster, plan: Plan, draw: Callable[[Step], tuple[Figure, str]]
) -> tuple[Figure, str]:
    """Draw a plan's step, or why it cannot run; and say the same."""
    try:
        if plan.world_size > cluster.num_devices:
            raise ValueError(
                f"the product is {plan.world_size}, and {cluster.name} has {cluster.num_devices} GPUs: lower a degree "
                f"until it is at most {cluster.num_devices}"
            )
        return draw(simulate(workload, cluster, plan))
    except ValueError as error:
        reason = " ".join(str(error).split())
        return impossible_figure(plan, reason), describe_impossible(plan, reason)


def changed_plan(base: Plan, *, stage: int, **values: Any) -> Plan:
    """Return a plan with what the controls say."""
    sharding = replace(base.sharding, stage=stage) if base.sharding.stage else Sharding(stage)
    return replace(base, sharding=sharding, **values)


def degree_controls(base: Plan, choices: Sequence[int], clusters: Mapping[str, Cluster]) -> dict[str, widgets.Widget]:
    """Return a slider for each degree and for micro-batches, and the controls of what else a plan says."""
    controls: dict[str, widgets.Widget] = {
        axis: widgets.SelectionSlider(options=list(choices), value=getattr(base, axis), description=axis)
        for axis in reversed(AXES)
    }
    batches = sorted({*DEGREES[:8], base.num_microbatches})
    controls["num_microbatches"] = widgets.SelectionSlider(
        options=batches, value=base.num_microbatches, description="micro-batches"
    )
    controls["stage"] = widgets.Dropdown(
        options=list(STAGES.items()), value=base.sharding.stage, description="sharding"
    )
    controls["recompute"] = widgets.Dropdown(options=list(RECOMPUTES), value=base.recompute, description="recompute")
    controls["sequence_parallel"] = widgets.Checkbox(value=base.sequence_parallel, description="sequence parallel")
    if len(clusters) > 1:
        controls["on"] = widgets.Dropdown(options=list(clusters), description="cluster")
    return controls
