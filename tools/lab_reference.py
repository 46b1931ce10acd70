"""Measure every lab with its default settings and write what it printed to lessons/NN/lab_reference.md.

Run it with nothing else running; sections of a device or a number of ranks that this machine cannot measure are kept
as they are.

    python tools/lab_reference.py            # all labs
    python tools/lab_reference.py 03 --ranks 4
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from distlab.cli.course import find_lab
from distlab.course.grading import lessons
from distlab.course.lab.report import reference_section
from distlab.measure import this_machine

LESSONS = Path(__file__).resolve().parents[1] / "lessons"
DEVICES = {"cpu": (1, 2, 3, 4), "cuda": (1, 2, 4, 8)}
NOT_MEASURED = {
    "cpu": "Not measured yet. If you run it, send us what `--json` prints.",
    "cuda": "Not measured here: this machine has no such GPUs. If you run it, send us what `--json` prints.",
}
CALM = 0.5  # the load average, before the first lab, of a machine whose times can be compared with


def section_name(device: str, num_ranks: int) -> str:
    return f"{device}, {num_ranks} rank{'s' if num_ranks > 1 else ''}"


def measure(number: str, device: str, num_ranks: int) -> str:
    command = [sys.executable, "-m", "distlab", "lab", number, "--ranks", str(num_ranks), "--json"]
    done = subprocess.run([*command, "--device", device], stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    return reference_section(json.loads(done.stdout))


def known_sections(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    parts = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.M)[1:]
    return {name.strip(): body.strip() for name, _, body in (part.partition("\n") for part in parts)}


def how_busy(load: float) -> str:
    """Say what ran beside the labs, from the load average before the first of them."""
    if round(load, 1) <= CALM:
        return f"load average {load:.1f} before the labs"
    return f"load average {load:.1f} before the labs: other programs ran, so times say little"


def write(path: Path, number: str, sections: dict[str, str], load: float) -> None:
    head = [
        f"# Reference output of lab {number}",
        "",
        "What `distlab lab` printed with default settings and the reference's functions. Facts (bytes, calls, equal or",
        "not) are the same everywhere; times are this machine's. Written by `tools/lab_reference.py`.",
        "",
        f"Measured {this_machine()}; {how_busy(load)}.",
        "",
    ]
    ordered = [(device, section_name(device, count)) for device, counts in DEVICES.items() for count in counts]
    body = [f"## {name}\n\n{sections.get(name, NOT_MEASURED[device])}\n" for device, name in ordered]
    path.write_text("\n".join([*head, *body]), encoding="utf-8")


def labs() -> list[str]:
    """The numbers of all lessons that have a lab."""
    return [number for number in lessons(LESSONS) if find_lab(number)]


def main() -> None:
    load = os.getloadavg()[0]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labs", nargs="*", default=labs(), metavar="NN")
    parser.add_argument("--ranks", type=int, nargs="*", help="numbers of ranks to measure (default: all)")
    parser.add_argument("--device", choices=tuple(DEVICES), default="cpu")
    arguments = parser.parse_args()
    for name in arguments.labs:
        number, script = find_lab(name)
        path = script.parent / "lab_reference.md"
        sections = known_sections(path)
        for num_ranks in arguments.ranks or DEVICES[arguments.device]:
            section = section_name(arguments.device, num_ranks)
            sections[section] = measure(number, arguments.device, num_ranks)
            print(f"lab {number}: {section}", flush=True)
            write(path, number, sections, load)


if __name__ == "__main__":
    main()
