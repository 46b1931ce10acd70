"""Choose a plan and see what fills a device's memory, or how large a unit of sharding should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import ipywidgets as widgets

from distlab.plan import Cluster, Device, Plan, Precision, Sharding, Workload
from distlab.plan.records import RECOMPUTES
from simulator.hardware import presets as hardware
from simulator.memory.advice import DoesNotFitError, check_fit
from simulator.memory.memory import memory_of
from simulator.models.by_name import model_by_name
from simulator.step.simulate import simulate
from simulator.sweeps.fsdp_units import sweep_units, unit_sizes, with_unit_layers
from simulator.units import capitalised
from simulator.viz.drawing.picture import Picture
from simulator.viz.memory.compare import draw_memory_of_plans
from simulator.viz.memory.memory import draw_memory
from simulator.viz.memory.unit_size import draw_sharding
from simulator.viz.panels.panel import Panel

PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "float32 (16 bytes a parameter)": Precision(),
        "bfloat16, all in it (8)": Precision("bfloat16", master=False, reduce="bfloat16", gradients="bfloat16"),
        "bfloat16, float32 master weights (16)": Precision("bfloat16", reduce="bfloat16", gradients="bfloat16"),
        "bfloat16, float32 master and gradients (18)": Precision("bfloat16"),
    }
)
MODELS = ("llama-2-7b", "llama-2-70b", "gpt-3-175b", "gpt-2-1.5b")
SHARDED_MODEL, CLUSTER, MAX_PREFETCH = "llama-2-7b", "dgx-h100", 3
NUM_DEVICES = (8, 16, 32, 64)
OVER_ALL, NODE = "over all GPUs", "inside each node"
STAGES = MappingProxyType({"none": 0, "ZeRO-1: optimizer": 1, "ZeRO-2: + gradients": 2, "ZeRO-3: + parameters": 3})
DEGREES = tuple(2**power for power in range(11))


def memory_panel(*, devices: Sequence[str] = ("a100-sxm-80gb", "h200-sxm")) -> Panel:
    """Return a panel of models and plans: what the fullest rank holds, by kind and over the step.

    In code: `panel.controls["stage"].value = 3`, `panel.controls["picture"].value = "stages"` for all stages of
    sharding side by side.

    Args:
        devices: names of presets.

    Raises:
        ValueError: there is no device, or one is not known.
    """
    if not devices:
        raise ValueError("there is no device; pass at least one name")
    workload = cache(model_by_name)
    known = {name: hardware.device(name) for name in devices}

    def draw(picture: str, model: str, device: str, microbatch: int, **degrees: Any) -> Picture:
        pictures = _draw_stages if picture == "stages" else _draw_plan
        return pictures(workload(model, microbatch_size=microbatch), _plan(**degrees), known[device])

    return Panel(draw, **_controls(devices))


def _draw_plan(workload: Workload, plan: Plan, device: Device) -> Picture:
    """Draw one plan's memory against the device; the text says what to change where it does not fit."""
    picture = draw_memory(memory_of(workload, plan), capacity_bytes=device.memory_bytes)
    try:
        check_fit(workload, plan, device)
    except DoesNotFitError as error:
        return picture._replace(words=f"{picture.words} {capitalised(error.advice)}.")
    return picture


def _draw_stages(workload: Workload, plan: Plan, device: Device) -> Picture:
    """Draw the plan with every stage of sharding, side by side."""
    plans = {
        name if stage else "no sharding": memory_of(workload, replace(plan, sharding=Sharding(stage)))
        for name, stage in STAGES.items()
    }
    return draw_memory_of_plans(plans, capacity_bytes=device.memory_bytes)


def _plan(*, data: int, stage: int, recompute: str, precision: str, tensor: int, pipeline: int) -> Plan:
    return Plan(
        data=data,
        pipeline=pipeline,
        num_microbatches=4 * pipeline if pipeline > 1 else 1,
        sharding=Sharding(stage),
        precision=PRECISIONS[precision],
        recompute=recompute,
        tensor=tensor,
        sequence_parallel=tensor > 1,
    )


def _controls(devices: Sequence[str]) -> dict[str, widgets.Widget]:
    def powers(description: str, most: int, value: int = 1) -> widgets.Widget:
        options = [degree for degree in DEGREES if degree <= most]
        return widgets.SelectionSlider(options=options, value=value, description=description)

    return {
        "model": widgets.Dropdown(options=list(MODELS), description="model"),
        "device": widgets.Dropdown(options=list(devices), description="device"),
        "data": powers("data-parallel ranks", 1024, 8),
        "stage": widgets.Dropdown(options=list(STAGES.items()), value=0, description="sharding"),
        "recompute": widgets.Dropdown(options=list(RECOMPUTES), description="recompute"),
        "precision": widgets.Dropdown(options=list(PRECISIONS), value=list(PRECISIONS)[2], description="precision"),
        "microbatch": powers("samples per micro-batch", 32),
        "tensor": powers("tensor-parallel ranks", 8),
        "pipeline": powers("pipeline stages", 16),
        "picture": widgets.Dropdown(options=[("this plan", "plan"), ("all stages", "stages")], description="show"),
    }


def sharding_panel(
    workload: Workload | None = None,
    cluster: Cluster | None = None,
    plan: Plan | None = None,
    *,
    num_devices: Sequence[int] = NUM_DEVICES,
) -> Panel:
    """Return a panel with a slider of layers per unit, and controls of prefetch, GPUs, sets of shards and what is kept.

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
    model = model_by_name(SHARDED_MODEL, microbatch_size=1) if workload is None else workload
    machine = hardware.cluster(CLUSTER, max(num_devices), stack="best-case") if cluster is None else cluster
    base = Plan(data=1, sharding=Sharding(3), recompute="full") if plan is None else plan
    sizes = unit_sizes(model)
    sweep_of = cache(partial(sweep_units, model, sizes=sizes))

    def draw(unit_layers: int, prefetch: int, gpus: int, sets: str, keep: bool) -> Picture:
        on = replace(machine, num_devices=gpus)
        replicas = max(1, gpus // machine.devices_per_node) if sets == NODE else 1
        sharding = replace(
            base.sharding, stage=3, unit_layers=1, prefetch=prefetch, replicas=replicas, reshard_after_forward=not keep
        )
        chosen = replace(base, data=gpus, sharding=sharding)
        return draw_sharding(sweep_of(on, chosen), simulate(model, on, with_unit_layers(chosen, unit_layers)))

    return Panel(
        draw,
        unit_layers=widgets.SelectionSlider(
            options=list(sizes),
            value=min(sizes, key=lambda s: abs(s - base.sharding.unit_layers)),
            description="layers per unit",
        ),
        prefetch=widgets.IntSlider(value=min(base.sharding.prefetch, MAX_PREFETCH), min=0, max=MAX_PREFETCH),
        gpus=widgets.Dropdown(options=list(num_devices), value=num_devices[0], description="GPUs"),
        sets=widgets.Dropdown(options=[OVER_ALL, NODE], value=OVER_ALL, description="shards"),
        keep=widgets.Checkbox(
            value=not base.sharding.reshard_after_forward, description="keep parameters after forward"
        ),
    )
