"""Train a small GPT on real ranks, compare it with one process, and lay its measured timeline over the predicted one.

First one process makes ten updates. Then the ranks make the same ten on the same batches, each with its share of the
samples: the weights must be the same. Then the ranks go on in timed windows, with a calibration of this machine before
and after each, and the simulator predicts the step from the calibration.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distlab.cli.arguments import MAX_RANKS, check_output, whole_number
from distlab.cli.progress import progress_file, report

if TYPE_CHECKING:
    from distlab.cli.measure.findings import Findings
    from distlab.comm import Records
    from distlab.measure import RankReport, TrainingRun
    from simulator.viz import Overlay

SAMPLES_PER_RANK = 4
BUCKET_BYTES, FIRST_BUCKET_BYTES = 1_000_000, 250_000
NUM_UPDATES = 10  # after which the ranks' weights are compared with one process


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab tour`."""
    ranks = whole_number(most=MAX_RANKS)
    command.add_argument("--ranks", type=ranks, default=4, metavar="N", help="processes to train on (default 4)")
    command.add_argument("--data", metavar="FILE", help="a text file to train on (default: Python's documentation)")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where ranks compute (default cpu)")
    command.add_argument("--output", type=Path, default=Path("tour"), metavar="DIR", help="folder for the two files")
    command.add_argument("--json", action="store_true", help="print the findings as JSON")


@dataclass(frozen=True)
class _Job:
    """What a rank runs; rank 0 reports how far it is."""

    training: TrainingRun
    data: bytes
    progress: Path

    def __call__(self) -> RankReport:
        import torch.distributed as dist

        from distlab.measure import time_training

        path = self.progress if dist.get_rank() == 0 else None
        return time_training(self.training, self.data, functools.partial(report, path))


def main(arguments: argparse.Namespace) -> int:
    """Run the tour; exit 0 when the ranks equal one process, else 1."""
    start = time.monotonic()
    training, data = prepare(arguments)
    check_output("--output", arguments.output, folder=True)
    findings, overlay = run_tour(arguments.ranks, training, data, echo=not arguments.json)
    say("3 of 3: draw the picture")
    files = write_files(arguments.output, findings, overlay)
    if arguments.json:
        facts = findings.as_dict() | {"files": [str(file) for file in files], "seconds": time.monotonic() - start}
        print(json.dumps(facts, indent=2))
    else:
        print(findings.table())
        print(f"\nSaved {' and '.join(map(str, files))} in {time.monotonic() - start:.0f} s.")
    return 0 if findings.equal else 1


def prepare(arguments: argparse.Namespace) -> tuple[TrainingRun, bytes]:
    """Check what the user asked for before any process starts, and read the data.

    Raises:
        ValueError: the data file cannot be used, or there is no GPU.
    """
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


def say(part: str) -> None:
    """Say on standard error which part begins; a tour takes a minute or more."""
    print(part, file=sys.stderr, flush=True)


def run_tour(num_ranks: int, training: TrainingRun, data: bytes, *, echo: bool) -> tuple[Findings, Overlay]:
    """Run one process, then the ranks; return what was found, and the timed steps over their prediction."""
    from distlab.cli.measure.findings import compare_runs
    from distlab.measure import RunResult, overlay_of_run

    one_process, reports, records = run_training(num_ranks, training, data, echo=echo)
    result = RunResult(training, reports)
    overlay = overlay_of_run(result)
    return compare_runs(result, one_process, records, overlay.middle_s), overlay


def run_training(
    num_ranks: int, training: TrainingRun, data: bytes, *, echo: bool
) -> tuple[RankReport, list[RankReport], Records]:
    """Train in one process, then on the ranks; return both reports and what the ranks' calls were."""
    from dataclasses import replace

    from distlab.comm import Ranks, run

    backend = "cpu" if training.device == "cpu" else None
    alone = replace(training, plan=replace(training.plan, data=1), num_windows=0)
    say(f"1 of 3: load torch, and train {training.num_updates} updates in one process")
    with progress_file(training.num_updates, "one process") as path:
        one_process = run(_Job(alone, data, path), 1, timeout_s=600.0, backend=backend, echo=echo)[0]
    say(
        f"2 of 3: train the same updates on {num_ranks} ranks, then measure this machine and time steps in turn "
        f"(about {training.budget_s:.0f} s)"
    )
    with (
        Ranks(num_ranks, timeout_s=600.0, backend=backend, echo=echo) as ranks,
        progress_file(training.num_updates + training.num_windows, f"{num_ranks} ranks") as path,
    ):
        reports = ranks.run(_Job(training, data, path))
        return one_process, reports, ranks.records()


def write_files(folder: Path, findings: Findings, overlay: Overlay) -> list[Path]:
    """Save the step of median length over its prediction as a picture, and for Chrome or Perfetto."""
    from distlab.trace import write_chrome
    from simulator.viz import draw_timeline

    picture, chrome = folder / "timeline.png", folder / "timeline.json"
    draw_timeline(overlay, title=findings.headline()).figure.savefig(picture, dpi=150)
    write_chrome(chrome, measured=overlay.measured, predicted=overlay.predicted.from_zero())
    return [picture, chrome]
