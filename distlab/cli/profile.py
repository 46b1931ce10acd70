"""`profile`: what measured steps say."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from distlab.cli.command import check_output, flag


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
