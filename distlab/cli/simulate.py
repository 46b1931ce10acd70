"""Predict the time and memory of a training step of a GPT on a described cluster, without running anything.

The cluster is a preset (distlab simulate --list) or a file that distlab calibrate wrote.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from distlab.cli.arguments import whole_number
from distlab.plan.records import GRADIENT_SYNCS, SCHEDULES, Cluster, Plan

if TYPE_CHECKING:
    from simulator import Step

SIZES = {
    "hidden": (4096, "hidden size"),
    "layers": (32, "layers"),
    "heads": (32, "attention heads"),
    "sequence": (2048, "tokens in a sequence"),
    "vocabulary": (51200, "vocabulary"),
    "microbatch": (1, "samples in a micro-batch"),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab simulate`."""
    for name, (default, what) in SIZES.items():
        command.add_argument(f"--{name}", type=whole_number(what), default=default, metavar="N", help=what)
    command.add_argument("--cluster", default="dgx-a100", metavar="NAME|FILE", help="a preset or a calibration file")
    command.add_argument("--list", action="store_true", help="print the presets and stop")
    command.add_argument("--data", type=whole_number("replicas"), default=8, metavar="N", help="replicas (default 8)")
    command.add_argument("--pipeline", type=whole_number("stages"), default=1, metavar="N", help="stages (default 1)")
    command.add_argument("--microbatches", type=whole_number("micro-batches"), default=1, metavar="N")
    command.add_argument("--schedule", choices=SCHEDULES, default="one_f_one_b", help="order of micro-batches")
    command.add_argument("--sync", choices=GRADIENT_SYNCS, default="overlapped", help="how gradients are averaged")
    command.add_argument("--bucket-mb", type=whole_number("MB"), default=25, metavar="N", help="bucket capacity")
    command.add_argument("--picture", type=Path, metavar="FILE", help="save the timeline as PNG")
    command.add_argument("--memory", type=Path, metavar="FILE", help="save what fills the memory as PNG")
    command.add_argument("--trace", type=Path, metavar="FILE", help="save the timeline for Chrome or Perfetto")
    command.add_argument("--json", action="store_true", help="print the step as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Simulate one step, print it, and save what was asked for."""
    from simulator import gpt_workload, hardware, simulate

    if arguments.list:
        print("\n".join(hardware.names("clusters")))
        return 0
    plan = Plan(
        data=arguments.data,
        pipeline=arguments.pipeline,
        num_microbatches=arguments.microbatches,
        schedule=arguments.schedule,
        gradient_sync=arguments.sync,
        bucket_bytes=arguments.bucket_mb * 1_000_000,
    )
    workload = gpt_workload(
        hidden_size=arguments.hidden,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        sequence_length=arguments.sequence,
        vocab_size=arguments.vocabulary,
        microbatch_size=arguments.microbatch,
    )
    step = simulate(workload, find_cluster(arguments.cluster, plan.world_size), plan)
    save_pictures(step, arguments.picture, arguments.memory)
    if arguments.trace:
        from distlab.trace.chrome import write_chrome

        write_chrome(arguments.trace, predicted=step.trace)
    print(json.dumps(facts(step), indent=2) if arguments.json else table(step))
    return 0


def save_pictures(step: Step, timeline: Path | None, memory: Path | None) -> None:
    """Draw the step's timeline (a pipeline as its schedule) and its memory, each where a file is named."""
    from simulator.viz import draw_memory, draw_schedule, draw_timeline

    if timeline:
        draw = draw_schedule if step.plan.pipeline > 1 else draw_timeline
        draw(step.trace).savefig(timeline, dpi=150)
    if memory:
        draw_memory(step.memory, capacity_bytes=step.cluster.device.memory_bytes).savefig(memory, dpi=150)


def find_cluster(name: str, num_devices: int) -> Cluster:
    """Return a preset with enough nodes for num_devices, or the cluster of a calibration file.

    Raises:
        ValueError: there is neither a preset nor a file of that name.
    """
    from simulator import hardware

    known = hardware.names("clusters")
    if name in known:
        per_node = hardware.cluster(name).devices_per_node
        nodes = -(-num_devices // per_node)
        return hardware.cluster(name, per_node * nodes)
    if not Path(name).exists():
        raise ValueError(f"{name!r} is neither a preset nor a file; presets: {', '.join(known)}")
    from distlab.measure.calibration import load_calibration

    return load_calibration(Path(name)).cluster


def facts(step: Step) -> dict[str, object]:
    """Return a step's figures as JSON-ready values."""
    return {
        "workload": step.workload.name,
        "cluster": step.cluster.name,
        "ranks": step.plan.world_size,
        "parameters": step.workload.num_parameters,
        "duration_s": step.duration_s,
        "samples_per_s": step.samples_per_s,
        "bubble_fraction": step.bubble_fraction,
        "exposed_communication_s": step.exposed_communication_s,
        "sent_bytes_per_rank": list(step.sent_bytes_per_rank),
        "max_memory_bytes": step.memory.max_bytes,
        "device_memory_bytes": step.cluster.device.memory_bytes,
        "fits": step.memory.max_bytes <= step.cluster.device.memory_bytes,
    }


def table(step: Step) -> str:
    """Lay a step out for a terminal."""
    from simulator.units import format_bytes, format_s

    fits = step.memory.max_bytes <= step.cluster.device.memory_bytes
    memory = f"{format_bytes(step.memory.max_bytes)} of {format_bytes(step.cluster.device.memory_bytes)}"
    rows = [
        ("model", f"{step.workload.name}, {step.workload.num_parameters / 1e9:.3g} billion parameters"),
        ("ranks", f"{step.plan.data} (data) x {step.plan.pipeline} (pipeline) on {step.cluster.name}"),
        ("step", f"{format_s(step.duration_s)}, {step.samples_per_s:.4g} samples a second"),
        ("bubble", f"{step.bubble_fraction:.1%} of the compute lanes"),
        ("exposed communication", format_s(step.exposed_communication_s)),
        ("sent by a rank", format_bytes(max(step.sent_bytes_per_rank))),
        ("memory, fullest rank", memory if fits else f"{memory}: DOES NOT FIT"),
    ]
    return "\n".join(f"{name:<22} {value}" for name, value in rows)
