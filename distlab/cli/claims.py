"""Commands that test claims: `bench` (of this project), `gpu` (what needs one), `validate` (published figures)."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from distlab.cli.command import check_output, flag, load_script, positive_number
from distlab.measure import this_machine

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NEEDED = (FOLDER / "gpu", FOLDER.parent / "tests")  # by `gpu`


@flag("name", nargs="*", metavar="NAME", help="benchmarks to run; all without a name")
@flag("--list", action="store_true", help="print the names and stop")
@flag("--quick", action="store_true", help="few blocks: shows that it runs, proves nothing")
@flag("--json", action="store_true", help="print rows as JSON")
@flag("--save", type=Path, metavar="FILE", help="keep the rows, with date, machine and versions")
def bench(arguments: argparse.Namespace) -> int:
    """Measure this project's claims against their bars and print one row per claim.

    Each file in benchmarks/ tests some claims: our program and its peer take turns in one run, and a row gives the
    median ratio with its interval, the bar, and whether it holds. Run it with nothing else running.
    """
    _find("bench", FOLDER)
    known = names()
    if arguments.list:
        print("\n".join(known))
        return 0
    if unknown := [name for name in arguments.name if name not in known]:
        raise ValueError(f"no benchmark is called {unknown[0]!r}; choose from {', '.join(known)}")
    chosen = arguments.name or known
    check_output("--save", arguments.save)
    kept = _saved(arguments.save)
    rows: list[dict[str, Any]] = []
    for place, name in enumerate(chosen, 1):
        print(f"[{place}/{len(chosen)}] {name} ...", file=sys.stderr, flush=True)
        found = []
        for row in load(name).rows(quick=arguments.quick):
            found.append(row.as_dict())
            if not arguments.json:
                print(row, flush=True)
        rows += found
        if arguments.save:  # in place of earlier rows of the same benchmark
            kept[name] = {"machine": this_machine().as_dict(), "rows": found}
            arguments.save.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    judged = [row for row in rows if row["holds"] is not None]
    if arguments.json:
        print(json.dumps({"machine": this_machine().as_dict(), "rows": rows}, indent=2))
    else:
        print(f"{sum(bool(row['holds']) for row in judged)} of {len(judged)} bars hold; {this_machine()}")
    return 0


def _find(command: str, *needed: Path) -> None:
    """Let Python find what only a checkout has, or refuse: benchmarks share modules, such as _script."""
    if missing := [path for path in needed if not path.is_dir()]:
        run = f"clone the repository and run `python -m distlab {command}` in it"
        raise ValueError(f"its parts live in a checkout of distlab, and {missing[0]} is missing; {run}")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


def names() -> list[str]:
    """Return the names of the benchmarks in this checkout."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def load(name: str) -> Any:
    """Load benchmarks/NAME.py by path and return the module."""
    return load_script(f"distlab_benchmark_{name}", FOLDER / f"{name}.py")


def _saved(path: Path | None) -> dict[str, object]:
    """Return what a results file holds; {} where there is none yet."""
    try:
        kept = json.loads(path.read_text()) if path and path.exists() else {}
    except ValueError:
        kept = None
    if not isinstance(kept, dict):
        raise ValueError(f"--save {path}: expected results of distlab bench, got something else; pass a different path")
    return kept


@flag("--minutes", type=positive_number, default=10.0, metavar="N", help="time for all")
@flag("--only", action="append", metavar="PART", help="run this part alone; may be repeated")
@flag("--out", type=Path, default=Path("gpu_report"), metavar="DIR", help="folder of the report")
@flag("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cpu runs the same parts small")
@flag("--json", action="store_true", help="print gpu.json at the end")
@flag("--list", action="store_true", help="print the parts, how long each takes, and stop")
def gpu(arguments: argparse.Namespace) -> int:
    """Run what needs a GPU, judge it, and write it down: gpu.json, GPU.md and pictures, within ten minutes.

    Parts run in the order of their worth, each in a process of its own with a time limit. A second run with the same
    --out goes on where the first one ended. Without a GPU it says what it would run, and checks that every part can be
    loaded.
    """
    _find("gpu", *NEEDED)
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


@flag("--json", action="store_true", help="print scores and rows as JSON")
@flag("--page", type=Path, metavar="FILE", help="write them as a page (.md), its pictures beside it")
@flag("--errors", type=Path, metavar="FILE", help="write what answers say of their error, as CSV")
@flag("--refit", action="store_true", help="print each stack's constants, fitted again, and stop")
def validate(arguments: argparse.Namespace) -> int:
    """Derive published steps, memory, bubbles and collectives again, and print how near the simulator comes.

    Each family of steps is predicted three times: with the constants of the package, with constants fitted without the
    row's own structure (its size, cluster or schedule), and from data sheets alone.
    """
    from simulator.validation import report

    def tell(name: str) -> None:
        print(f"predicting {name} ...", file=sys.stderr, flush=True)

    for name in ("page", "errors"):
        check_output(f"--{name}", getattr(arguments, name))
    if arguments.refit:
        for stack in report.refit(tell):
            fitted = (f"{name} = {getattr(stack, name):.4g}" for name in report.FITTED[stack.name])
            print(f"{stack.name}: {', '.join(fitted)}")
        return 0
    families = report.validate(tell)
    tell("tables")
    tables = report.derived()
    if arguments.page:
        report.write_page(arguments.page, families, tables)
    if arguments.errors:
        arguments.errors.write_text(report.text_of_errors(families), encoding="utf-8")
    print(json.dumps(report.facts(families, tables), indent=2) if arguments.json else report.text(families, tables))
    return 0
