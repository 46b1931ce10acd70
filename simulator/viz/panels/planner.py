"""Plan a run: drag degrees and see memory, a step over time and the price; or see which strategy wins where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from distlab.plan import Cluster, Plan, Sharding, Workload
from simulator.advisor.strategies import MapCell, strategy_map
from simulator.hardware.presets import cluster as cluster_by_name
from simulator.hardware.presets import link
from simulator.models.by_name import model_by_name
from simulator.runs.failures import Failures
from simulator.runs.money import Run, bill
from simulator.viz.mesh.planner import describe_planner, planner_figure
from simulator.viz.panels.degrees import changed_plan, degree_controls, or_why_not
from simulator.viz.panels.memory import DEGREES
from simulator.viz.panels.panel import Panel, by_name
from simulator.viz.runs.strategies import describe_strategy_map, draw_strategy_map

MODELS = ("llama-3-70b", "llama-3-8b", "llama-2-7b", "gpt-3-175b")
PLAN = Plan(4, 2, 64, tensor=8, sequence_parallel=True, sharding=Sharding(1), recompute="full")
MAP_MODELS = ("gpt-2-1.5b", "llama-2-7b", "llama-2-13b", "qwen-2.5-32b", "llama-2-70b", "gpt-3-175b")
MAP_COUNTS = (1, 8, 16, 32, 64, 128, 256)
WIRES = ("infiniband-ndr", "ethernet-100g", "ethernet-10g")


def planner_panel(
    models: Sequence[str] | Mapping[str, Workload] = MODELS,
    cluster: Cluster | Mapping[str, Cluster] | None = None,
    *,
    plan: Plan = PLAN,
    tokens: float = 1e12,
) -> Panel:
    """Return a panel that plans a run: model, cluster, degrees, price and tokens; memory, a step, days and dollars.

    In code: `panel.controls["model"].value = "llama-3-8b"`, `panel.controls["tensor"].value = 4`,
    `panel.controls["price"].value = 4.0`. Failures are those of Llama 3. A plan that cannot run is drawn too.

    Args:
        models: names of published models, or models by name.
        cluster: what the run is on, or several by name; by default 512 H100s or A100s in nodes of eight.
        plan: where the controls begin.
        tokens: of the run, where the slider begins.

    Raises:
        ValueError: there is no model or no cluster, or one is not known.
    """
    if not models:
        raise ValueError("there is no model; pass the name of one at least")
    presets = {name: cluster_by_name(name, 512) for name in ("dgx-h100", "dgx-a100")}
    clusters = by_name(presets if cluster is None else cluster, "cluster")
    workloads = dict(models) if isinstance(models, Mapping) else {name: model_by_name(name) for name in models}
    first = next(iter(clusters))
    most = max(one.num_devices for one in clusters.values())

    def draw(model: str, price: float, trillions: float, on: str = first, **values: Any) -> tuple[Figure, str]:
        run = Run(10**trillions * 1e12, price, Failures("llama-3"))
        chosen = changed_plan(plan, **values)

        def picture(step: Any) -> tuple[Figure, str]:
            found = bill(step, run)
            return planner_figure(found), describe_planner(found)

        return or_why_not(workloads[model], clusters[on], chosen, picture)

    begin = math.log10(tokens / 1e12)
    return Panel(
        draw,
        model=widgets.Dropdown(options=list(workloads), description="model"),
        **degree_controls(plan, [degree for degree in DEGREES if degree <= most], clusters),
        price=widgets.FloatSlider(value=2.5, min=0.5, max=10, step=0.1, description="dollars per GPU hour"),
        trillions=widgets.FloatSlider(
            value=begin, min=min(-3.0, begin), max=max(2.0, begin), step=0.05, description="tokens: 10^x trillion"
        ),
    )


def strategy_panel(
    models: Sequence[str] = MAP_MODELS,
    counts: Sequence[int] = MAP_COUNTS,
    *,
    cluster: str = "dgx-h100",
    wires: Sequence[str] = WIRES,
) -> Panel:
    """Return a panel with the wire between nodes and the batch: which strategy is fastest where.

    In code: `panel.controls["wire"].value = "ethernet-10g"`, `panel.controls["batch_size"].value = 1024`. A map takes
    some seconds the first time, and is kept.

    Args:
        models: names of published models, the lowest row first.
        counts: numbers of GPUs.
        cluster: a preset's name.
        wires: links of the presets to choose from.

    Raises:
        ValueError: a model, the cluster or a wire is not known, or there is none.
    """
    if not models or not counts or not wires:
        raise ValueError("there is no model, no number of GPUs or no wire; pass one of each at least")
    machine = cluster_by_name(cluster)

    @cache
    def cells(wire: str, batch_size: int) -> tuple[MapCell, ...]:
        return strategy_map(models, replace(machine, inter_node=link(wire)), counts, batch_size=batch_size)

    def draw(wire: str, batch_size: int) -> tuple[Figure, str]:
        return draw_strategy_map(cells(wire, batch_size)), describe_strategy_map(cells(wire, batch_size))

    return Panel(
        draw,
        wire=widgets.Dropdown(options=list(wires), description="between nodes"),
        batch_size=widgets.Dropdown(options=[64, 256, 1024], value=256, description="samples per step"),
    )
