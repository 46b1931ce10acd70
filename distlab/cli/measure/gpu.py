"""Run what needs a GPU, judge it, and write it down: gpu.json, GPU.md and pictures, within ten minutes.

Parts run in the order of their worth, each in a process of its own with a time limit. A second run with the same --out
goes on where the first one ended. Without a GPU it says what it would run, and checks that every part can be loaded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from functools import partial
from pathlib import Path

from distlab.cli.arguments import check_output, positive_number
from distlab.cli.measure.bench import FOLDER

NEEDED = (FOLDER / "gpu", FOLDER.parent / "tests")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab gpu`."""
    command.add_argument("--minutes", type=positive_number, default=10.0, metavar="N", help="time for all (default 10)")
    command.add_argument("--only", action="append", metavar="PART", help="run this part alone; may be repeated")
    command.add_argument(
        "--out", type=Path, default=Path("gpu_report"), metavar="DIR", help="folder of the report (default gpu_report)"
    )
    command.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="cpu runs the same parts small"
    )
    command.add_argument("--json", action="store_true", help="print gpu.json at the end")
    command.add_argument("--list", action="store_true", help="print the parts, how long each takes, and stop")


def main(arguments: argparse.Namespace) -> int:
    """Run the parts that were asked for.

    Raises:
        ValueError: the package was installed without its checkout, or a flag or the GPUs cannot be used.
    """
    missing = [path for path in NEEDED if not path.is_dir()]
    if missing:
        raise ValueError(
            f"its parts live in a checkout of distlab, and {missing[0]} is missing; clone the repository and run "
            "`python -m distlab gpu` in it"
        )
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    command = importlib.import_module("gpu.command")
    asked = command.settings(minutes=arguments.minutes, only=arguments.only, out=arguments.out, device=arguments.device)
    if arguments.list:
        print(command.list_parts(asked.parts))
        return 0
    is_new = not arguments.out.exists()
    check_output("--out", arguments.out, folder=True)
    try:
        status: int = command.main(asked, partial(print, file=sys.stderr) if arguments.json else print)
        if arguments.json:
            kept = arguments.out / command.FILE
            print(kept.read_text(encoding="utf-8") if kept.exists() else json.dumps({"no_gpu": True}))
        return status
    finally:
        if is_new and not any(arguments.out.iterdir()):
            arguments.out.rmdir()  # nothing was run
