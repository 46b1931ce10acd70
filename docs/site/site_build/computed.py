"""What widgets that compute in a page are given: counts and times of Python's models, which scripts do not repeat.

The scripts stand beside the panels that they mirror, in simulator/viz; `script` joins them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from distlab.plan import Cluster, Link, Plan, Workload, parse_schedule
from distlab.plan.work import COLUMNS
from simulator import RATES, cluster, gpt_workload
from simulator.hardware import presets as hardware
from simulator.models.by_name import model_by_name
from simulator.models.parts import tokens_of
from simulator.pipeline.schedule_arrays import B, F
from simulator.runs.failures import Failures
from simulator.runs.money import Run, batch_of, bill, curve
from simulator.step.simulate import simulate
from simulator.units import widths_of
from simulator.viz import draw_schedule, run_schedule
from simulator.viz.builder.levels import levels_json, times_of
from simulator.viz.drawing.pen import Picture
from simulator.viz.panels.communication import LINKS
from simulator.viz.panels.planner import MACHINE, MEMORY_MODELS, PRECISIONS, cost_steps
from simulator.viz.runs import draw_cost_curve

VIZ = Path(__file__).parents[3] / "simulator" / "viz"
SCRIPTS = ("drawing/play.js", "collectives/ring.js", "memory.js", "runs.js", "data_parallel/train_step.js")
STANDS_FOR = {"02_collectives.frames": "ring", "03_data_parallel.prediction_panel": "step", "06_memory.fits": "memory"}
MODEL = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "sequence_length": 1024, "vocab_size": 50_304}


def script() -> str:
    """Return the scripts as one: players, their pen, controls for any widget, and what mounts a player."""
    text = "\n".join((VIZ / name).read_text() for name in SCRIPTS)
    return f"window.distlabPlayers ??= (() => {{\n{text}\nreturn {{ PLAYERS, Pen, make, control, compute }};\n}})();\n"


def widget(name: str) -> dict[str, Any]:
    """Return what a page needs of a widget that mirrors a panel: its player, and what that is given."""
    return {"player": name, "data": globals()[name]()}


def with_pictures() -> Iterator[tuple[str, dict[str, Any], Picture]]:
    """Yield what no lesson shows, with a picture: the cost of a run; the schedule builder's first level, and all."""
    bills = [bill(each, Run(15e12, 2.5, Failures())) for each in cost_steps()]
    yield "cost", widget("cost"), draw_cost_curve(curve(bills))
    levels = json.loads(levels_json())
    best = run_schedule("", parse_schedule(levels[0]["best"]["text"]), times_of(levels[0]))
    yield "builder", {"levels": levels[:1], "level": "1"}, draw_schedule(best.trace)
    yield "levels", {"levels": levels, "address": True}, draw_schedule(best.trace)


def ring() -> dict[str, Any]:
    """Return the links that pages offer."""
    return {"links": {name: asdict(hardware.link(name)) for name in LINKS}}


def memory() -> dict[str, Any]:
    """Return what memory counts of each layer of some models, devices, and bytes of numbers."""
    models, layers = {name: model_by_name(name) for name in MEMORY_MODELS}, dict[str, list[dict[str, Any]]]()
    for name, workload in models.items():
        rows = zip(workload.layers, workload.columns.T.tolist(), strict=True)
        layers[name] = [dict(zip((*COLUMNS, "sizes"), (*row, each.parameter_sizes), strict=True)) for each, row in rows]
    plans = {name: Plan(precision=each) for name, each in PRECISIONS.items()}
    return {
        "models": layers,
        "devices": {name: hardware.device(name).memory_bytes for name in ("h100-sxm", "h200-sxm", "a100-sxm-80gb")},
        "precisions": {name: widths_of(models[MEMORY_MODELS[0]], plan)._asdict() for name, plan in plans.items()},
    }


def cost() -> dict[str, Any]:
    """Return steps (devices, tokens, seconds, seconds to save), and how often devices fail in an hour."""
    rows, model = list[tuple[float, ...]](), cost_steps()[0].workload
    for each in cost_steps():
        wait_s = Failures().waits_s(model, each.plan)
        rows.append((each.plan.world_size, batch_of(each) * tokens_of(model), each.steady_s, wait_s))
    rates = {name: rate.per_device_hour for name, rate in RATES.items()}
    return {"model": model.name, "cluster": MACHINE, "steps": rows, "rates": rates}


def on_wire(link: Link) -> Cluster:
    """Return 64 H100s, each on such a wire of its own to all others."""
    return replace(cluster("dgx-h100", 64, stack="best-case"), intra_node=link, devices_per_node=64)


def step_of(workload: Workload, machine: Cluster) -> dict[str, Any]:
    """Return how long each layer and the update take, and the bytes of each gradient."""
    (stage,) = simulate(workload, machine, Plan()).stages
    sizes = [[size * widths_of(workload, Plan()).reduce for size in each.parameter_sizes] for each in workload.layers]
    return {"layers": [*zip(stage.passes_ns[F], stage.passes_ns[B], sizes, strict=True)], "update": stage.optimizer_ns}


def step() -> dict[str, Any]:
    """Return a small GPT's layers at some numbers of samples."""
    machine = on_wire(hardware.link(LINKS[0]))
    models = {f"{count}": step_of(gpt_workload(microbatch_size=count, **MODEL), machine) for count in (1, 2, 4, 8, 16)}
    return {"models": models, "memory": machine.device.memory_bytes_per_s} | ring()
