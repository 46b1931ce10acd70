"""Measure this project's claims against their bars and print one row per claim.

Each file in benchmarks/ tests some claims: our program and its peer take turns in one run, and a row gives the median
ratio with its interval, the bar, and whether it holds. Run it with nothing else running.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from distlab.cli.arguments import check_output, load_script
from distlab.measure import this_machine

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab bench`."""
    command.add_argument("name", nargs="*", metavar="NAME", help="benchmarks to run; all without a name")
    command.add_argument("--list", action="store_true", help="print the names and stop")
    command.add_argument("--quick", action="store_true", help="few blocks: shows that it runs, proves nothing")
    command.add_argument("--json", action="store_true", help="print rows as JSON")
    command.add_argument("--save", type=Path, metavar="FILE", help="keep the rows, with date, machine and versions")


def main(arguments: argparse.Namespace) -> int:
    """Run the benchmarks that were named."""
    known = names()
    if arguments.list:
        print("\n".join(known))
        return 0
    unknown = [name for name in arguments.name if name not in known]
    if unknown:
        raise ValueError(f"no benchmark is called {unknown[0]!r}; choose from {', '.join(known)}")
    chosen = arguments.name or known
    if arguments.save:
        check_output("--save", arguments.save)
        saved(arguments.save)
    results: dict[str, list[dict[str, object]]] = {}
    for place, name in enumerate(chosen, 1):
        print(f"[{place}/{len(chosen)}] {name} ...", file=sys.stderr, flush=True)
        results[name] = []
        for row in load(name).rows(quick=arguments.quick):
            results[name].append(row.as_dict())
            if not arguments.json:
                print(row, flush=True)
        if arguments.save:
            save(arguments.save, {name: results[name]})
    rows = [row for part in results.values() for row in part]
    judged = [row for row in rows if row["holds"] is not None]
    if arguments.json:
        print(json.dumps({"machine": this_machine().as_dict(), "rows": rows}, indent=2))
    else:
        print(f"{sum(bool(row['holds']) for row in judged)} of {len(judged)} bars hold; {this_machine()}")
    return 0


def names() -> list[str]:
    """Return the names of the benchmarks in this checkout.

    Raises:
        ValueError: the package was installed without its checkout.
    """
    if not FOLDER.is_dir():
        raise ValueError(f"benchmarks live in a checkout of distlab, and {FOLDER} is missing; clone the repository")
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def load(name: str) -> Any:
    """Load benchmarks/NAME.py by path and return the module."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # benchmarks share modules, such as _script
    return load_script(f"distlab_benchmark_{name}", FOLDER / f"{name}.py")


def saved(path: Path) -> dict[str, object]:
    """Return what a results file holds; {} where there is none yet.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        kept = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        kept = None
    if not isinstance(kept, dict):
        raise ValueError(f"--save {path}: expected results of distlab bench, got something else; pass a different path")
    return kept


def save(path: Path, results: dict[str, list[dict[str, object]]]) -> None:
    """Write rows into a results file, in place of earlier rows of the same benchmark."""
    kept = saved(path)
    for name, rows in results.items():
        kept[name] = {"machine": this_machine().as_dict(), "rows": rows}
    path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
