"""`tour`: the whole project in a minute, on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.command import NUM_RANKS, check_output, flag
from distlab.comm.command import runnable

if TYPE_CHECKING:
    from distlab.comm import Records
    from distlab.measure import RankReport, RunResult, TrainingRun
    from simulator.viz import Overlay

SAMPLES_PER_RANK = 4
BUCKET_BYTES, FIRST_BUCKET_BYTES = 1_000_000, 250_000
NUM_UPDATES = 10  # after which the ranks' weights are compared with one process
TOLERANCE = 1e-5  # of weights in fp32, by SGD with momentum
STEP_BAR = 0.15


@flag("--ranks", type=NUM_RANKS, default=4, metavar="N", help="processes to train on")
@flag("--data", metavar="FILE", help="a text file to train on (default: Python's documentation)")
@flag("--device", choices=("cpu", "cuda"), default="cpu", help="where ranks compute")
@flag("--output", type=Path, default=Path("tour"), metavar="DIR", help="folder for the two files")
@flag("--json", action="store_true", help="print the findings as JSON")
def tour(arguments: argparse.Namespace) -> int:
    """Train a small GPT on real ranks, compare it with one process, lay its measured timeline over the predicted one.

    First one process makes ten updates. Then the ranks make the same ten on the same batches, each with its share of
    the samples: the weights must be the same. Then the ranks go on in timed windows, with a calibration of this machine
    before and after each, and the simulator predicts the step from the calibration.
    """
    start = time.monotonic()
    training, data = prepare(arguments)
    check_output("--output", arguments.output, folder=True)
    from distlab.measure import RunResult, overlay_of_run

    one_process, reports, records = run_training(arguments.ranks, training, data, echo=not arguments.json)
    result = RunResult(training, reports)
    overlay = overlay_of_run(result)
    said = _facts(result, one_process, records, overlay)
    print("3 of 3: draw the picture", file=sys.stderr, flush=True)
    files = [str(file) for file in _write(arguments.output, said, overlay)]
    said |= {"files": files, "seconds": time.monotonic() - start}
    saved = f"Saved {' and '.join(files)} in {said['seconds']:.0f} s."
    print(json.dumps(said, indent=2) if arguments.json else f"{text(said)}\n\n{saved}")
    return 0 if said["equal"] else 1


def prepare(arguments: argparse.Namespace) -> tuple[TrainingRun, bytes]:
    """Check what the user asked for before any process starts, and read the data; a ValueError says what is wrong."""
    from distlab.blocks.data import python_documentation, read_text
    from distlab.blocks.models import GPTConfig
    from distlab.measure import TrainingRun, device_of
    from distlab.plan import Plan

    model = GPTConfig(context=64, num_layers=4, num_heads=4, hidden_size=128)
    data = python_documentation() if arguments.data is None else read_text(arguments.data, model.context)
    device_of(arguments.device, 0)
    plan = Plan(data=arguments.ranks, bucket_bytes=BUCKET_BYTES, first_bucket_bytes=FIRST_BUCKET_BYTES)
    batch_size = SAMPLES_PER_RANK * arguments.ranks
    return TrainingRun(model, plan, batch_size, num_updates=NUM_UPDATES, device=arguments.device), data


def run_training(
    num_ranks: int, training: TrainingRun, data: bytes, *, echo: bool
) -> tuple[RankReport, list[RankReport], Records]:
    """Train in one process, then on the ranks; return both reports and what the ranks' calls were."""
    from distlab.comm import Ranks, run
    from distlab.measure import time_training

    backend = "cpu" if training.device == "cpu" else None
    alone = replace(training, plan=replace(training.plan, data=1), num_windows=0)
    say = partial(print, file=sys.stderr, flush=True)  # a tour takes a minute or more
    say(f"1 of 3: load torch, and train {training.num_updates} updates in one process")
    one_process = run(time_training, 1, args=(alone, data), timeout_s=600.0, backend=backend, echo=echo)[0]
    say(
        f"2 of 3: train the same updates on {num_ranks} ranks, then measure this machine and time steps in turn "
        f"(about {training.budget_s:.0f} s)"
    )
    with Ranks(num_ranks, timeout_s=600.0, backend=backend, echo=echo) as ranks:
        return one_process, ranks.run(time_training, training, data), ranks.records()


def _facts(result: RunResult, one_process: RankReport, records: Records, overlay: Overlay) -> dict[str, Any]:
    """Compare the ranks with one process, and the step of median length with its prediction, as JSON-ready values.

    `sent_bytes` is what rank 0 sent in a step, each collective counted as the ring that its library runs. `equal` asks
    that no weight differs by more than 1e-5 from one process's, and that all ranks agree bit for bit.
    """
    from distlab.comm.record.operations import ring_bytes
    from distlab.measure import this_machine

    reports, first, run = result.reports, result.reports[0], result.run
    gap = max(float((weight - one_process.weights[name]).abs().max()) for name, weight in first.weights.items())
    agree = all(bool((each.weights[name] == one).all()) for each in reports for name, one in first.weights.items())
    start_ns, end_ns = first.step_ns[0]
    calls = [call for call in records.calls(0) if start_ns <= call.start_ns <= end_ns]
    verdict = result.verdict(bar=STEP_BAR)
    said = {"ranks": len(reports), "device": run.device, "parameters": result.predicted.workload.num_parameters}
    said |= {"updates": run.num_updates, "max_difference": gap, "equal": gap <= TOLERANCE and agree}
    said |= {"losses_one_process": one_process.losses, "losses": first.losses}
    said["sent_bytes"] = round(sum(ring_bytes(call.op, call.num_bytes, len(call.group)) for call in calls))
    said["predicted_bytes"] = round(result.predicted.sent_bytes_per_rank[0])
    said |= {"step": asdict(verdict), "verdict": str(verdict)}
    said |= dict(zip(("measured_step_s", "predicted_step_s"), overlay.middle_s, strict=True))
    return said | {"exposed_s": result.predicted.exposed_communication_s, "machine": this_machine().as_dict()}


def text(said: dict[str, Any]) -> str:
    """Lay the findings out for a terminal."""
    measured_s, predicted_s, last = said["measured_step_s"], said["predicted_step_s"], said["updates"] - 1
    alone, losses, sent, ranks = said["losses_one_process"], said["losses"], said["sent_bytes"], said["ranks"]
    more = sent - said["predicted_bytes"]  # the batch's number, the loss and flags
    why = f" ({more:,} more: the loss, flags that tell of faults, and padding)" if more > 0 else ""
    rows = [
        ("", "one process", f"{ranks} ranks"),
        ("loss at the start", f"{alone[0]:.4f}", f"{losses[0]:.4f}"),
        (f"loss at update {said['updates']}", f"{alone[last]:.4f}", f"{losses[last]:.4f}"),
        ("loss at the end", "-", f"{losses[-1]:.4f}"),
        ("weights equal?", "", f"{'yes' if said['equal'] else 'NO'} (largest difference {said['max_difference']:.1e})"),
        ("", "", ""),
        ("", "predicted", "measured"),
        ("bytes sent, rank, step", f"{said['predicted_bytes']:,}", f"{sent:,}{why}"),
        ("median step, as drawn", f"{predicted_s * 1e3:.1f} ms", f"{measured_s * 1e3:.1f} ms"),
        ("exposed communication", f"{said['exposed_s'] * 1e3:.1f} ms", "see the picture"),
        ("error of the prediction", "", f"{predicted_s / measured_s - 1:+.1%}"),
    ]
    lines = [f"{name:<23}  {one:>11}  {other}".rstrip() for name, one, other in rows]
    again = runnable(f"distlab tour --ranks {ranks} --device {said['device']}")
    retry = [f"Try again: {again}"] if said["step"]["holds"] is None else []
    return "\n".join([*lines, "", f"{said['parameters']:,} parameters on {said['device']}; {said['verdict']}", *retry])


def _write(folder: Path, said: dict[str, Any], overlay: Overlay) -> list[Path]:
    from distlab.trace import write_chrome
    from simulator.viz import draw_timeline

    picture, chrome = folder / "timeline.png", folder / "timeline.json"
    outcome = "compute what one process computes" if said["equal"] else "DIFFER from one process"
    title = f"{said['ranks']} ranks {outcome}; the median step, measured over predicted"
    draw_timeline(overlay, title=title).figure.savefig(picture, dpi=150)
    write_chrome(chrome, measured=overlay.measured, predicted=overlay.predicted.from_zero())
    return [picture, chrome]
