"""Predict the time and memory of a training step on a described cluster, without running anything.

The cluster is a preset (distlab simulate --list) or a file that distlab calibrate wrote. A plan file (TOML with
[workload], [cluster] and [plan]) says all of it in place of flags.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.arguments import check_output
from distlab.cli.predict.flags import add_description, changed_flags, cluster_of, presets, said_by
from distlab.plan import SCHEDULES, Cluster, Plan, Workload

if TYPE_CHECKING:
    from simulator import Memory, Step

SHOWN = 8
MOST_RANKS = 1_000_000
MOST_PASSES = 2_000_000
"""A step of at most this many ranks, or passes, is simulated within a minute."""
MANY_PASSES = 200_000
"""From this number on, the user is told that it takes seconds."""
MOST_RESERVED = 1.13  # over what is counted: 2410.06511, tables 1 to 3, 2024


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab simulate`."""
    command.add_argument("--list", action="store_true", help="print the presets and stop")
    command.add_argument("--timeline", "--picture", type=Path, metavar="FILE", help="save the timeline as PNG")
    command.add_argument("--memory", type=Path, metavar="FILE", help="save a picture (PNG) of what fills the memory")
    command.add_argument("--trace", type=Path, metavar="FILE", help="save the timeline for Chrome or Perfetto")
    command.add_argument("--json", action="store_true", help="print the step as JSON")
    add_description(command)


def check_size(plan: Plan) -> None:
    """Refuse what would take minutes."""
    if plan.world_size > MOST_RANKS:
        raise ValueError(f"the plan has {plan.world_size:,} ranks; simulate takes at most {MOST_RANKS:,}")
    passes = plan.pipeline * plan.stages_per_rank * plan.num_microbatches
    if passes > MOST_PASSES:
        raise ValueError(
            f"the plan runs {passes:,} passes (stages x micro-batches); simulate takes at most {MOST_PASSES:,}"
        )
    if passes > MANY_PASSES:
        print(f"simulating {passes:,} passes; this takes up to a minute", file=sys.stderr, flush=True)


def main(arguments: argparse.Namespace) -> int:
    """Simulate one step, print it, and save what was asked for.

    Where time is not simulated, `--memory` alone counts memory; a plan that asks for time is refused.
    """
    from simulator import memory_of, simulate, why_not_timed
    from simulator.plan_file import told_of

    if arguments.list:
        print(presets())
        return 0
    said = said_by(arguments)
    plan = said.plan
    with told_of(arguments.file):
        check_size(plan)
        if arguments.file is None:
            cluster = cluster_of(said.cluster, plan.world_size)
            workload = said.workload.workload()
        else:
            workload, cluster = said.made()
    for flag in ("timeline", "memory", "trace"):
        check_output(f"--{flag}", getattr(arguments, flag), picture=flag != "trace")
    why_no_time = why_not_timed(plan)
    if why_no_time and (arguments.timeline or arguments.trace or not arguments.memory):
        raise ValueError(f"the step's time is not simulated: {why_no_time}; or use --memory FILE, which needs no time")
    with told_of(arguments.file):
        step = None if why_no_time else simulate(workload, cluster, plan, order=said.order)
        memory = step.memory if step else memory_of(workload, plan, flat_buffers=cluster.software.flat_buffers)
    _save(arguments, step, memory, cluster)
    counted = memory_facts(workload, plan, cluster, memory)
    notes = _notes(workload, plan, step, counted)
    if arguments.json:
        about = {"workload": workload.name, "cluster": cluster.name, "ranks": plan.world_size}
        about |= {"parameters": workload.num_parameters, "notes": notes}
        print(json.dumps(about | (facts(step) if step else {}) | counted, indent=2))
    else:
        print(table(workload, plan, cluster, step=step, counted=counted, notes=notes))
    return 0


def _save(arguments: argparse.Namespace, step: Step | None, memory: Memory, cluster: Cluster) -> None:
    """Draw the timeline (a pipeline as its schedule) and the memory, and write the trace, where files are named."""
    from distlab.trace import write_chrome
    from simulator import viz

    if arguments.timeline and step:
        draw = viz.draw_schedule if step.plan.pipeline > 1 else viz.draw_timeline
        draw(step.trace).figure.savefig(arguments.timeline, dpi=150)
    if arguments.memory:
        viz.draw_memory(memory, capacity_bytes=cluster.device.memory_bytes).figure.savefig(arguments.memory, dpi=150)
    if arguments.trace and step:
        write_chrome(arguments.trace, predicted=step.trace)


def facts(step: Step) -> dict[str, object]:
    """Return the figures of a step's time as JSON-ready values.

    `duration_s` is one step alone, from its first start to its last end; `steady_s` each of many steps in a row. All
    rates are over `duration_s`. All ranks at one place in the pipeline send the same.
    """
    names = ("duration_s", "steady_s", "samples_per_s", "bubble_fraction", "mfu", "exposed_communication_s")
    return {name: getattr(step, name) for name in names} | {
        "utilization_of_achieved_rate": step.utilization,
        "exposed_s_by_axis": dict(step.exposed_by_axis),
        "sent_bytes_by_axis": dict(step.sent_bytes_by_axis),
        "sent_bytes_by_pipeline_rank": list(step.sent_bytes_by_pipeline_rank),
    }


def memory_facts(workload: Workload, plan: Plan, cluster: Cluster, memory: Memory) -> dict[str, Any]:
    """Return what fills the fullest rank as JSON-ready values, and what to change where it does not fit."""
    from simulator import DoesNotFitError, check_fit
    from simulator.memory.memory import KINDS
    from simulator.units import format_bytes

    device, why = cluster.device, ""
    try:
        check_fit(workload, plan, device, flat_buffers=cluster.software.flat_buffers, memory=memory)
    except DoesNotFitError as error:
        why = str(error)
        if error.change is not None:
            flags = changed_flags(plan, error.change.plan)  # a micro-batch that is cut makes more of fewer samples
            flags += [f"--microbatch {workload.samples // error.change.split}"] if error.change.split > 1 else []
            needs = format_bytes(error.change.max_bytes)
            why = f"{error.args[0]}; add {' '.join(flags)}, and it needs {needs}"
    kinds = memory.at_peak_bytes[memory.fullest_stage].tolist()
    return {
        "max_memory_bytes": memory.max_bytes,
        "device_memory_bytes": device.memory_bytes,
        "memory_bytes_by_kind": dict(zip(KINDS, kinds, strict=True)),
        "host_memory_bytes": memory.host_bytes,
        "fits": memory.fits(device),
        "why_not": why,
    }


def _notes(workload: Workload, plan: Plan, step: Step | None, counted: dict[str, Any]) -> list[str]:
    """Return what to know of the plan's figures; see `simulator.step.timed.notes_on`."""
    from simulator.step.timed import notes_on

    notes = list(notes_on(plan, step.mfu if step else 0.0, workload))
    if counted["fits"] and counted["max_memory_bytes"] * MOST_RESERVED > counted["device_memory_bytes"]:
        notes.append(
            "near the device's memory: published runs of torchtitan reserved 3 to 13 % more than is counted, which "
            "leaves out fragments and libraries"
        )
    return notes


def table(
    workload: Workload, plan: Plan, cluster: Cluster, *, step: Step | None, counted: dict[str, Any], notes: list[str]
) -> str:
    """Lay a step out for a terminal."""
    from simulator import why_not_timed
    from simulator.units import format_bytes, format_s

    used = f"{format_bytes(counted['max_memory_bytes'])} of {format_bytes(counted['device_memory_bytes'])}"
    degrees = {axis: getattr(plan, axis) for axis in ("data", "pipeline", "tensor", "context", "expert")}
    shown = " x ".join(f"{n} ({axis})" for axis, n in degrees.items() if n > 1 or axis in ("data", "pipeline"))
    rows = [("does not fit", counted["why_not"])] if counted["why_not"] else []
    rows += [("note", note) for note in notes]
    rows += [
        ("model", f"{workload.name}, {_count(workload.num_parameters)} parameters"),
        ("ranks", f"{shown} on {cluster.name}"),
    ]
    if step is None:
        rows.append(("step", f"not simulated: {why_not_timed(plan)}"))
    elif not counted["fits"]:
        rows.append(("step", f"would take {format_s(step.duration_s)} if it fitted"))
    else:
        rows += _rows_of(step)
    rows.append(("memory, fullest rank", used if counted["fits"] else f"{used}: DOES NOT FIT"))
    by_kind = sorted(counted["memory_bytes_by_kind"].items(), key=lambda pair: -pair[1])
    rows += [(f"  {kind}", format_bytes(size)) for kind, size in by_kind if size]
    if counted["host_memory_bytes"]:
        rows.append(("memory of the host", f"{format_bytes(counted['host_memory_bytes'])} per rank"))
    return "\n".join(f"{name:<22} {value}" for name, value in rows)


def _count(number: float) -> str:
    if number < 1e6:
        return f"{number:,.0f}"
    return f"{number / 1e9:.3g} billion" if number >= 1e8 else f"{number / 1e6:.3g} million"


def _rows_of(step: Step) -> list[tuple[str, str]]:
    """Return the rows about a step's time, its rates and what it sends."""
    from simulator.units import counted, format_bytes, format_flops_per_s, format_s

    plan, device, rows = step.plan, step.cluster.device, []
    if plan.pipeline > 1:
        stages = f"{plan.stages_per_rank} stages per rank, " if plan.stages_per_rank > 1 else ""
        held = ", ".join(map(str, step.memory.in_flight[:SHOWN])) + (", ..." if plan.pipeline > SHOWN else "")
        what = f"{SCHEDULES[plan.schedule].title}, {stages}{counted(plan.num_microbatches, 'micro-batch')}"
        rows.append(("schedule", f"{what}, in flight {held}"))
    rows.append(("step", f"{format_s(step.duration_s)}, {step.samples_per_s:.4g} samples per second"))
    if step.steady_s < 0.999 * step.duration_s:
        rows.append(("step in a run", f"{format_s(step.steady_s)}, where no rank waits for the others between steps"))
    rows.append(("bubble", f"{step.bubble_fraction:.1%} of the compute lanes"))
    if device.peak_flops_per_s is not None:
        peak = format_flops_per_s(device.peak_flops_per_s)
        rows.append(("MFU", f"{step.mfu:.1%} of the data sheet's {peak} per rank"))
    if plan.float8 == "none":
        reached = format_flops_per_s(device.matmul_flops_per_s)
        rows.append(("of achievable products", f"{step.utilization:.1%} of {reached}"))
    rows.append(("exposed communication", format_s(step.exposed_communication_s)))
    rows.append(("sent per rank", format_bytes(max(step.sent_bytes_by_pipeline_rank))))
    waits, sent = step.exposed_by_axis, step.sent_bytes_by_axis
    rows += [
        (f"  {axis}", f"{format_bytes(sent[axis])} sent, {format_s(waits[axis])} exposed")
        for axis in waits
        if sent[axis]
    ]
    return rows
