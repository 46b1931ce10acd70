"""Say where the time of measured steps goes, rank by rank, and what makes them slow.

A TRACE is a file of torch.profiler (JSON, plain or gzipped; one per rank), a file or a folder of this project (from
`distlab lab NN --trace FOLDER`, or `Profiler.save`), or a folder of such files. Clocks are aligned on the collectives.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from distlab.cli.arguments import check_output

if TYPE_CHECKING:
    from distlab.profile import Profile
    from distlab.trace import Trace


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab profile`."""
    command.add_argument("trace", nargs="+", type=Path, metavar="TRACE", help="files, or folders of them")
    what = "compare with the step that this plan file predicts (see distlab simulate)"
    command.add_argument("--plan", type=Path, metavar="PLAN.toml", help=what)
    command.add_argument("--sections", type=Path, metavar="FILE", help="save the sections of each rank as PNG")
    command.add_argument("--timeline", type=Path, metavar="FILE", help="save the timeline of the middle step as PNG")
    command.add_argument("--save", type=Path, metavar="FILE", help="save measured and predicted for Chrome or Perfetto")
    command.add_argument("--json", action="store_true", help="print sections and findings as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Read the traces, print what they say, and save what was asked for."""
    from distlab.profile import Profile, find, read_files, report

    for flag in ("sections", "timeline", "save"):
        check_output(f"--{flag}", getattr(arguments, flag), picture=flag != "save")
    measured, predicted = read_files(arguments.trace)
    if arguments.plan is not None:
        predicted = Profile.of(_predict(arguments.plan))
    if arguments.json:
        about = {"step_s": measured.step_s.tolist(), "sections_s": measured.mean_s(), "notes": list(measured.notes)}
        about["findings"] = [asdict(finding) for finding in find(measured)]
        print(json.dumps(about, indent=2))
    else:
        print(report(measured, predicted))
    _save(measured, predicted, arguments)
    return 0


def _predict(plan: Path) -> Trace:
    """Simulate the step of a plan file.

    Raises:
        ValueError: the file is wrong, or the plan's time is not simulated.
    """
    from simulator import read_plan_file

    return read_plan_file(plan).simulate().trace


def _save(measured: Profile, predicted: Profile | None, arguments: argparse.Namespace) -> None:
    from distlab.trace import write_chrome

    step = measured.middle_step()
    other = None if predicted is None else predicted.trace
    if arguments.save:
        write_chrome(arguments.save, measured=step, **({} if other is None else {"predicted": other}))
    if not (arguments.sections or arguments.timeline):
        return
    from simulator.viz import draw_sections, draw_timeline

    if arguments.sections:
        expected = None if predicted is None else predicted.mean_s()
        draw_sections(measured.mean_s(), expected).figure.savefig(arguments.sections, dpi=150)
    if arguments.timeline:
        draw_timeline(step, other).figure.savefig(arguments.timeline, dpi=150)
