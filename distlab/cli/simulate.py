"""Commands about a step: `simulate` (predicted), `export` (in a different tool's words), `profile` (measured)."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.command import check_output, flag, flags, positive_number
from distlab.cli.flags import add_description, changed_flags, cluster_of, said_by
from distlab.plan import SCHEDULES, Cluster, Plan, Workload
from distlab.plan.mesh import sizes_of

if TYPE_CHECKING:
    from simulator import Memory, PlanFile, Step

SHOWN = 8
MOST_RANKS, MOST_PASSES = 1_000_000, 2_000_000  # a step of so many is simulated within a minute
MANY_PASSES = 200_000  # from here on the user is told that it takes seconds
TOOLS = ("deepspeed", "fsdp2", "torchtitan", "megatron", "accelerate", "torchrun", "slurm", "pytorchjob", "jobset")


def check_size(plan: Plan) -> None:
    """Refuse what would take minutes."""
    if plan.world_size > MOST_RANKS:
        raise ValueError(f"the plan has {plan.world_size:,} ranks; simulate takes at most {MOST_RANKS:,}")
    passes = plan.pipeline * plan.stages_per_rank * plan.num_microbatches
    if passes > MOST_PASSES:
        runs = f"the plan runs {passes:,} passes (stages x micro-batches)"
        raise ValueError(f"{runs}; simulate takes at most {MOST_PASSES:,}")
    if passes > MANY_PASSES:
        print(f"simulating {passes:,} passes; this takes up to a minute", file=sys.stderr, flush=True)


@flag("--list", action="store_true", help="print the presets and stop")
@flag("--timeline", "--picture", type=Path, metavar="FILE", help="save the timeline as PNG")
@flag("--memory", type=Path, metavar="FILE", help="save a picture (PNG) of what fills the memory")
@flag("--trace", type=Path, metavar="FILE", help="save the timeline for Chrome or Perfetto")
@flag("--json", action="store_true", help="print the step as JSON")
@flags(add_description)
def simulate(arguments: argparse.Namespace) -> int:
    """Predict the time and memory of a training step on a described cluster, without running anything.

    The cluster is a preset (distlab simulate --list) or a file that distlab calibrate wrote. A plan file (TOML with
    [workload], [cluster] and [plan]) says all of it in place of flags.
    """
    from simulator import memory_of, sheet_note, simulate, why_not_timed
    from simulator.listing import list_presets
    from simulator.memory.memory import KINDS
    from simulator.plan_file import told_of
    from simulator.validation.confidence import words_on_step

    if arguments.list:
        print(list_presets())
        return 0
    said = said_by(arguments)
    plan = said.plan
    with told_of(arguments.file):
        workload, cluster = _made(said, arguments.file)
    for name in ("timeline", "memory", "trace"):
        check_output(f"--{name}", getattr(arguments, name), picture=name != "trace")
    why_no_time = why_not_timed(plan)
    if why_no_time and (arguments.timeline or arguments.trace or not arguments.memory):
        raise ValueError(f"the step's time is not simulated: {why_no_time}; or use --memory FILE, which needs no time")
    with told_of(arguments.file):
        step = None if why_no_time else simulate(workload, cluster, plan, order=said.order)
        memory = step.memory if step else memory_of(workload, plan, software=cluster.software)
    _save(arguments, step, memory, cluster)
    found: dict[str, Any] = {"workload": workload.name, "cluster": cluster.name, "ranks": plan.world_size}
    found |= {"parameters": workload.num_parameters} | (_facts(step) if step else {})
    found |= {"max_memory_bytes": memory.max_bytes, "device_memory_bytes": cluster.device.memory_bytes}
    kinds = memory.at_peak_bytes[memory.fullest_stage].tolist()
    found |= {"memory_bytes_by_kind": dict(zip(KINDS, kinds, strict=True)), "host_memory_bytes": memory.host_bytes}
    found |= {"fits": memory.fits(cluster.device), "verdict": memory.verdict(cluster.device)}
    found["why_not"] = "" if found["fits"] else _why_not(said, workload, cluster, arguments.file)
    found["notes"] = [*filter(None, [sheet_note(cluster.device)]), *_notes(workload, plan, found)]
    found |= words_on_step(workload, cluster, memory.max_bytes) | {"reserved_bytes": memory.reserved_bytes}
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(f"{name:<22} {value}" for name, value in _rows(plan, step, found, why_no_time)))
    return 0


def _save(arguments: argparse.Namespace, step: Step | None, memory: Memory, cluster: Cluster) -> None:
    from distlab.trace import write_chrome
    from simulator import viz

    if arguments.timeline and step:
        draw = viz.draw_schedule if step.plan.pipeline > 1 else viz.draw_timeline
        draw(step.trace).figure.savefig(arguments.timeline, dpi=150)
    if arguments.memory:
        viz.draw_memory(memory, capacity_bytes=cluster.device.memory_bytes).figure.savefig(arguments.memory, dpi=150)
    if arguments.trace and step:
        write_chrome(arguments.trace, predicted=step.trace)


def _facts(step: Step) -> dict[str, object]:
    """Return the figures of a step's time as JSON-ready values.

    `duration_s` is one step alone, from its first start to its last end; `steady_s` each of many steps in a row. All
    rates are over `duration_s`. All ranks at one place in the pipeline send the same.
    """
    names = ("duration_s", "steady_s", "samples_per_s", "bubble_fraction", "mfu", "exposed_communication_s")
    found = {name: getattr(step, name) for name in (*names, *["loader_wait_s"][: step.loader_wait_s > 0])}
    found |= {"utilization_of_achieved_rate": step.utilization}
    found |= {"exposed_s_by_axis": dict(step.exposed_by_axis), "sent_bytes_by_axis": dict(step.sent_bytes_by_axis)}
    return found | {"sent_bytes_by_pipeline_rank": list(step.sent_bytes_by_pipeline_rank)}


def _made(said: PlanFile, file: str | None) -> tuple[Workload, Cluster]:
    """Return the model and the cluster; what a flag names may be a calibration."""
    check_size(said.plan)
    return said.made() if file else (said.workload.workload(), cluster_of(said.cluster, said.plan.world_size))


def _why_not(said: PlanFile, workload: Workload, cluster: Cluster, file: str | None) -> str:
    """Return why a plan does not fit, and what makes it fit, in flags or in words of its file; "": it fits."""
    from simulator import DoesNotFitError, check_fit, memory_of, simulate, why_not_timed

    def run(workload: Workload, plan: Plan) -> Memory:  # counts a changed plan as this command does
        workload, cluster = _made(said.changed(plan, workload.samples), file)
        if why_not_timed(said.plan):
            return memory_of(workload, plan, software=cluster.software)
        return simulate(workload, cluster, plan, order=said.order).memory

    how: Any = {"software": cluster.software, "run": run}
    try:
        check_fit(workload, said.plan, cluster.device, **how)
    except DoesNotFitError as error:
        if (change := error.change) is None:
            return str(error)
        after = said.changed(change.plan, workload.samples // change.split)
        words = f"add {changed_flags(after, said)}" if file is None else f"write {said.difference(after)}"
        return f"{error.args[0]}; {change.why}{words}, and it needs {change.holds}"
    return ""


def _notes(workload: Workload, plan: Plan, found: dict[str, Any]) -> list[str]:
    from simulator.step.timed import notes_on

    notes = list(notes_on(plan, found.get("mfu", 0.0), workload, found.get("loader_wait_s", 0.0)))
    if found["verdict"] == "tight":
        how = "and 20 to 36 % in FSDP without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        notes.append(f"near the device's memory: published runs reserved 3 to 19 % more than their tensors took, {how}")
    return notes


def _rows(plan: Plan, step: Step | None, found: dict[str, Any], why_no_time: str) -> list[tuple[str, str]]:
    from simulator.units import format_bytes, format_s, in_words

    used = f"{format_bytes(found['max_memory_bytes'])} of {format_bytes(found['device_memory_bytes'])}"
    sizes = zip(axes := ("data", "pipeline", "tensor", "context", "expert"), sizes_of(plan, axes), strict=True)
    shown = " x ".join(f"{n} ({axis})" for axis, n in sizes if n > 1 or axis in axes[:2])
    rows = [("does not fit", found["why_not"])] if found["why_not"] else []
    rows += [("note", note) for note in found["notes"]]
    rows.append(("model", f"{found['workload']}, {in_words(found['parameters'])} parameters"))
    there = f"; {plan.num_replicas} data ranks in Megatron-LM's and torchtitan's words" if plan.expert > 1 else ""
    there = f", experts over {plan.expert} of a stage" if plan.fold_experts else there
    rows.append(("ranks", f"{shown} on {found['cluster']}{there}"))
    if step is None:
        rows.append(("step", f"not simulated: {why_no_time}"))
    elif not found["fits"]:
        rows.append(("step", f"would take {format_s(step.duration_s)} if it fitted"))
    else:
        rows += _rows_of(step, found["error_of_time"])
    told = found["verdict"] if found["verdict"] == "fits" else found["verdict"].upper()
    told += f"; reserved, with fragments and context: {' to '.join(map(format_bytes, found['reserved_bytes']))}"
    rows += [("memory, fullest rank", f"{used}: {told}"), ("error of the memory", found["error_of_memory"])]
    by_kind = sorted(found["memory_bytes_by_kind"].items(), key=lambda pair: -pair[1])
    rows += [(f"  {kind}", format_bytes(size)) for kind, size in by_kind if size]
    if found["host_memory_bytes"]:
        rows.append(("memory of the host", f"{format_bytes(found['host_memory_bytes'])} per rank"))
    return rows


def _rows_of(step: Step, error: str) -> list[tuple[str, str]]:
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
    rows.append(("error of the time", error))
    rows.append(("bubble", f"{step.bubble_fraction:.1%} of the compute lanes"))
    if device.peak_flops_per_s is not None:
        peak = format_flops_per_s(device.peak_flops_per_s)
        rows.append(("MFU", f"{step.mfu:.1%} of the data sheet's {peak} per rank"))
    if plan.float8 == "none":
        reached = format_flops_per_s(device.matmul_flops_per_s)
        rows.append(("of achievable products", f"{step.utilization:.1%} of {reached}"))
    rows.append(("exposed communication", format_s(step.exposed_communication_s)))
    rows.append(("sent per rank", format_bytes(max(step.sent_bytes_by_pipeline_rank))))
    for axis, waits_s in step.exposed_by_axis.items():
        if sent := step.sent_bytes_by_axis[axis]:
            rows.append((f"  {axis}", f"{format_bytes(sent)} sent, {format_s(waits_s)} exposed"))
    return rows


@flag("--to", required=True, choices=TOOLS, help="whose words to print")
@flag("--max-norm", type=positive_number, metavar="NORM", help="clip the gradients' norm (default: do not)")
@flag("--blocks", default="blocks", metavar="NAME", help="name of the model's list of layers, for FSDP2")
@flag("--script", default="train.py", metavar="WORDS", help="what a launcher runs, with its arguments")
@flag("--image", default="pytorch/pytorch:latest", help="the container of pytorchjob and jobset")
@flags(add_description)
def export(arguments: argparse.Namespace) -> int:
    """Print a plan in the words of a different tool: its configuration, its flags, or what starts the ranks.

    The plan is a file, or the flags of distlab simulate. A part that the tool cannot express is refused in one line;
    deepspeed and fsdp2, whose users write code of their own, leave it out and say where it goes. That, and what the
    tool does otherwise, is said on standard error, or in comments where the file takes them.
    """
    from simulator.export import Options, export
    from simulator.plan_file import told_of

    said = said_by(arguments)
    options = Options(arguments.max_norm, arguments.blocks, arguments.script, arguments.image)
    with told_of(arguments.file):
        found = export(said, arguments.to, options)
    print(found.text, end="")
    for note in found.notes:
        print(f"# {note}", file=sys.stderr)
    return 0


@flag("trace", nargs="+", type=Path, metavar="TRACE", help="files, or folders of them")
@flag("--plan", type=Path, metavar="PLAN.toml", help="compare with the step that this plan file predicts")
@flag("--sections", type=Path, metavar="FILE", help="save the sections of each rank as PNG")
@flag("--timeline", type=Path, metavar="FILE", help="save the timeline of the middle step as PNG")
@flag("--save", type=Path, metavar="FILE", help="save measured and predicted for Chrome or Perfetto")
@flag("--json", action="store_true", help="print sections and findings as JSON")
def profile(arguments: argparse.Namespace) -> int:
    """Say where the time of measured steps goes, rank by rank, and what makes them slow.

    A TRACE is a file of torch.profiler (JSON, plain or gzipped; one per rank), a file or a folder of this project (from
    `distlab lab NN --trace FOLDER`, or `Profiler.save`), or a folder of such files. Clocks are aligned on the
    collectives.
    """
    from distlab.profile import Profile, find, read_files, report

    for name in ("sections", "timeline", "save"):
        check_output(f"--{name}", getattr(arguments, name), picture=name != "save")
    measured, predicted = read_files(arguments.trace)
    if arguments.plan is not None:
        from simulator import read_plan_file

        predicted = Profile.of(read_plan_file(arguments.plan).simulate().trace)
    if arguments.json:
        about = {"step_s": measured.step_s.tolist(), "sections_s": measured.mean_s(), "notes": list(measured.notes)}
        print(json.dumps(about | {"findings": [asdict(finding) for finding in find(measured)]}, indent=2))
    else:
        print(report(measured, predicted))
    other, expected_s = (None, None) if predicted is None else (predicted.trace, predicted.mean_s())
    if arguments.save:
        from distlab.trace import write_chrome

        write_chrome(arguments.save, measured=measured.middle_step(), **({} if other is None else {"predicted": other}))
    if arguments.sections:
        from simulator.viz import draw_sections

        draw_sections(measured.mean_s(), expected_s).figure.savefig(arguments.sections, dpi=150)
    if arguments.timeline:
        from simulator.viz import draw_timeline

        draw_timeline(measured.middle_step(), other).figure.savefig(arguments.timeline, dpi=150)
    return 0
