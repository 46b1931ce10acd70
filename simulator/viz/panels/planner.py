"""Plan a run: choose a plan and see what fills memory, a step over time, the price, and which strategy wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import ipywidgets as widgets

from distlab.plan import AXES, Cluster, Plan, Precision, Sharding, Workload
from distlab.plan.records import RECOMPUTES
from distlab.plan.require import chosen
from simulator.advisor.reasons import MapCell, strategy_map
from simulator.hardware import presets as hardware
from simulator.memory.advice import DoesNotFitError, check_fit
from simulator.memory.memory import memory_of
from simulator.models.by_name import model_by_name
from simulator.runs.failures import Failures, checkpoint_bytes
from simulator.runs.money import Run, bill, counts_of, spread
from simulator.runs.published import RATES
from simulator.step.simulate import Step, simulate
from simulator.sweeps.fsdp_units import sweep_units, unit_sizes, with_unit_layers
from simulator.units import capitalised, format_s, in_words
from simulator.viz.drawing.pen import Picture
from simulator.viz.memory import draw_memory, draw_memory_of_plans
from simulator.viz.mesh.degrees import draw_degrees, draw_impossible, draw_planner
from simulator.viz.panels.panel import Panel, choice, logarithmic, slider
from simulator.viz.runs import draw_goodput, draw_strategy_map
from simulator.viz.sweeps import draw_sharding

PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "float32 (16 bytes a parameter)": Precision(),
        "bfloat16, all in it (8)": Precision("bfloat16", master=False, reduce="bfloat16", gradients="bfloat16"),
        "bfloat16, float32 master weights (16)": Precision("bfloat16", reduce="bfloat16", gradients="bfloat16"),
        "bfloat16, float32 master and gradients (18)": Precision("bfloat16"),
    }
)
MEMORY_MODELS = ("llama-2-7b", "llama-2-70b", "gpt-3-175b", "gpt-2-1.5b")
MAX_PREFETCH = 3
OVER_ALL, NODE = "over all GPUs", "inside each node"
STAGES = MappingProxyType({"none": 0, "ZeRO-1: optimizer": 1, "ZeRO-2: + gradients": 2, "ZeRO-3: + parameters": 3})
DEGREES = tuple(2**power for power in range(11))


def memory_panel(*, devices: Sequence[str]) -> Panel:
    """Return a panel of models and plans: what the fullest rank holds, by kind and over the step.

    In code: `panel.controls["stage"].value = 3`, `panel.controls["picture"].value = "stages"` for all stages of
    sharding side by side.

    Args:
        devices: names of presets.

    Raises:
        ValueError: a device is not known.
    """
    model_of = cache(model_by_name)
    known = {name: hardware.device(name) for name in devices}

    def draw(picture: str, model: str, device: str, microbatch: int, stage: int, **plan: Any) -> Picture:
        workload, capacity = model_of(model, microbatch_size=microbatch), known[device].memory_bytes
        plan |= {"num_microbatches": 4 * plan["pipeline"] if plan["pipeline"] > 1 else 1}
        this = Plan(**plan | {"sequence_parallel": plan["tensor"] > 1, "precision": PRECISIONS[plan["precision"]]})
        if picture == "stages":
            named = {name if which else "no sharding": Sharding(which) for name, which in STAGES.items()}
            plans = {name: memory_of(workload, replace(this, sharding=each)) for name, each in named.items()}
            return draw_memory_of_plans(plans, capacity_bytes=capacity)
        this = replace(this, sharding=Sharding(stage))
        shown = draw_memory(memory_of(workload, this), capacity_bytes=capacity)
        try:
            check_fit(workload, this, known[device])
        except DoesNotFitError as error:
            return shown._replace(words=f"{shown.words} {capitalised(error.advice)}.")
        return shown

    return Panel(
        draw,
        model=choice("model", MEMORY_MODELS),
        device=choice("device", devices),
        data=_powers("data-parallel ranks", 1024, 8),
        stage=choice("sharding", STAGES.items()),
        recompute=choice("recompute", RECOMPUTES),
        precision=choice("precision", PRECISIONS, list(PRECISIONS)[2]),
        microbatch=_powers("micro-batch size", 32),
        tensor=_powers("tensor-parallel ranks", 8),
        pipeline=_powers("pipeline stages", 16),
        picture=choice("show", [("this plan", "plan"), ("all stages", "stages")]),
    )


def _powers(words: str, most: int, value: int = 1) -> Any:
    """Return a slider of the powers of two up to the most."""
    return choice(words, [degree for degree in DEGREES if degree <= most], value, is_slider=True)


def sharding_panel(workload: Workload, cluster: Cluster, plan: Plan, *, num_devices: Sequence[int]) -> Panel:
    """Return a panel with a slider of layers per unit, and controls of prefetch, GPUs, sets of shards and what is kept.

    In code: `panel.controls["unit_layers"].value = 4`, `panel.controls["prefetch"].value = 0`,
    `panel.controls["sets"].value = "inside each node"`.

    Args:
        workload: the model.
        cluster: what it runs on; the GPUs that are chosen may be more or fewer than it has.
        plan: where the controls begin, and all that they do not set.
        num_devices: numbers of GPUs to choose from.

    Raises:
        ValueError: as `sweep_units`.
    """
    base, sizes = plan.sharding, unit_sizes(workload)
    sweep_of = cache(partial(sweep_units, workload, sizes=sizes))

    def draw(unit_layers: int, prefetch: int, gpus: int, sets: str, keep: bool) -> Picture:
        on = replace(cluster, num_devices=gpus)
        replicas = max(1, gpus // cluster.devices_per_node) if sets == NODE else 1
        sharding = replace(base, stage=3, unit_layers=1, prefetch=prefetch, replicas=replicas)
        on_all = replace(plan, data=gpus, sharding=replace(sharding, reshard_after_forward=not keep))
        return draw_sharding(sweep_of(on, on_all), simulate(workload, on, with_unit_layers(on_all, unit_layers)))

    nearest = min(sizes, key=lambda size: abs(size - base.unit_layers))

    return Panel(
        draw,
        unit_layers=choice("layers per unit", sizes, nearest, is_slider=True),
        prefetch=widgets.IntSlider(value=min(base.prefetch, MAX_PREFETCH), min=0, max=MAX_PREFETCH),
        gpus=choice("GPUs", num_devices),
        sets=choice("shards", [OVER_ALL, NODE]),
        keep=widgets.Checkbox(not base.reshard_after_forward, description="keep parameters after forward"),
    )


MACHINE = "dgx-h100"
OF_COST = Plan(8, 4, 64, tensor=8, sequence_parallel=True, sharding=Sharding(1), recompute="selective")
WIRES = ("infiniband-ndr", "ethernet-100g", "ethernet-10g")
DEVICES = tuple(2**power for power in range(3, 18))
FAILING = tuple(name for name, rate in RATES.items() if rate.per_device_hour)


def degrees_panel(workload: Workload, cluster: Cluster, *, plan: Plan) -> Panel:
    """Return a panel with a slider for each degree, and controls of micro-batches, sharding and recompute.

    In code: `panel.controls["tensor"].value = 4`, `panel.controls["recompute"].value = "full"`,
    `panel.controls["sequence_parallel"].value = True`.

    A plan that cannot run is drawn too: its equation, and in words why not.

    Args:
        workload: the model.
        cluster: what it runs on.
        plan: where the controls begin, and all that they do not set.

    Raises:
        ValueError: a degree of the plan is not among the slider's: powers of two, up to the cluster's devices.
    """
    draw = partial(draw_degrees, num_devices=cluster.num_devices)
    controls = _degree_controls(plan, cluster)
    return Panel(lambda **values: _or_why_not(workload, cluster, plan, values, draw), **controls)


def planner_panel(models: Mapping[str, Workload], cluster: Cluster, *, plan: Plan, tokens: float) -> Panel:
    """Return a panel that plans a run: model, degrees, price and tokens; memory, a step, days and dollars.

    In code: `panel.controls["model"].value = "7B"`, `panel.controls["tensor"].value = 4`,
    `panel.controls["price"].value = 4.0`. Failures are those of Llama 3. A plan that cannot run is drawn too.

    Args:
        models: models by name.
        cluster: what the run is on.
        plan: where the controls begin.
        tokens: of the run, where the slider begins.

    Raises:
        ValueError: as `degrees_panel`.
    """

    def draw(model: str, price: float, tokens: float, **values: Any) -> Picture:
        run = Run(tokens, price, Failures("llama-3"))
        return _or_why_not(models[model], cluster, plan, values, lambda step: draw_planner(bill(step, run)))

    return Panel(
        draw,
        model=choice("model", models),
        **_degree_controls(plan, cluster),
        price=slider("dollars per GPU hour", 2.5, 0.5, 10, 0.1),
        tokens=logarithmic("tokens", tokens, 9, 14, in_words),
    )


@cache
def cost_steps() -> tuple[Step, ...]:
    """Return steps of a Llama 3 of 70 billion parameters on H100s, with the same batch on each number of them."""
    return spread(model_by_name("llama-3-70b"), hardware.cluster(MACHINE), OF_COST, counts_of(OF_COST)).steps


def goodput_panel() -> Panel:
    """Return a panel with the devices, the failures, and the times of a restart and a checkpoint: where the time goes.

    In code: `panel.controls["num_devices"].value = 1024`, `panel.controls["times_rate"].value = 2.0`.
    The first checkpoint takes as long as that of a Llama 3 of 405 billion parameters at 2 TB/s.
    """
    first_s = checkpoint_bytes(model_by_name("llama-3-405b"), Plan()) / 2e12

    def draw(num_devices: int, failures: str, times_rate: float, restart_minutes: float, save_s: float) -> Picture:
        name: str | float = failures if times_rate == 1 else RATES[failures].per_device_hour * times_rate
        return draw_goodput(Failures(name, restart_s=60 * restart_minutes), num_devices, save_s)

    return Panel(
        draw,
        num_devices=choice("devices", DEVICES, 16_384, is_slider=True),
        failures=choice("failures", FAILING),
        times_rate=slider("times as often", 1.0, 0.1, 10, 0.1),
        restart_minutes=slider("minutes to restart", 10, 1, 120, 1),
        save_s=logarithmic("time to save", first_s, -1, 4, format_s),
    )


def strategy_panel(models: Sequence[str], counts: Sequence[int]) -> Panel:
    """Return a panel with the wire between nodes and the batch: which strategy is fastest where.

    In code: `panel.controls["wire"].value = "ethernet-10g"`, `panel.controls["batch_size"].value = 1024`. A map takes
    some seconds the first time, and is kept.

    Args:
        models: names of published models, the lowest row first.
        counts: numbers of GPUs.

    Raises:
        ValueError: a model is not known.
    """
    machine = hardware.cluster(MACHINE)

    @cache
    def cells(wire: str, batch_size: int) -> tuple[MapCell, ...]:
        return strategy_map(models, replace(machine, inter_node=hardware.link(wire)), counts, batch_size=batch_size)

    return Panel(
        lambda wire, batch_size: draw_strategy_map(cells(wire, batch_size)),
        wire=choice("between nodes", WIRES),
        batch_size=choice("samples per step", [64, 256, 1024], 256),
    )


def _or_why_not(
    workload: Workload, cluster: Cluster, base: Plan, values: dict[str, Any], draw: Callable[[Step], Picture]
) -> Picture:
    """Draw the step of a plan with what the controls say, or why it cannot run."""
    stage = values.pop("stage")
    sharding = replace(base.sharding, stage=stage) if base.sharding.stage else Sharding(stage)
    plan = replace(base, sharding=sharding, **values)
    try:
        if plan.world_size > cluster.num_devices:
            raise ValueError(
                f"the product is {plan.world_size}, and {cluster.name} has {cluster.num_devices} GPUs: lower a degree "
                f"until it is at most {cluster.num_devices}"
            )
        return draw(simulate(workload, cluster, plan))
    except ValueError as error:
        return draw_impossible(plan, " ".join(str(error).split()))


def _degree_controls(base: Plan, cluster: Cluster) -> dict[str, Any]:
    """Return a slider for each degree and for micro-batches, and the controls of what else a plan says."""
    choices = [degree for degree in DEGREES if degree <= cluster.num_devices]
    for axis in AXES:
        chosen(f"the plan's {axis}", str(getattr(base, axis)), map(str, choices))
    microbatches = sorted({*DEGREES[:8], base.num_microbatches})
    return {
        **{axis: choice(axis, choices, getattr(base, axis), is_slider=True) for axis in reversed(AXES)},
        "num_microbatches": choice("micro-batches", microbatches, base.num_microbatches, is_slider=True),
        "stage": choice("sharding", STAGES.items(), base.sharding.stage),
        "recompute": choice("recompute", RECOMPUTES, base.recompute),
        "sequence_parallel": widgets.Checkbox(value=base.sequence_parallel, description="sequence parallel"),
    }
