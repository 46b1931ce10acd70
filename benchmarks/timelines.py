"""How often the timelines of the lessons are right: predicted over measured, run again and again as a reader runs them.

A lesson's timeline is an `Overlay`, and the cell that measures it calibrates too. From the solution's notebook this
takes each cell that measures an `overlay`, and the cells that it needs: those that define the names that it uses. It
runs them in a kernel, and repeats the cell that measures. For each timeline it writes the median of the absolute
errors and the share of runs whose measured median lies in the predicted band. Runs that said that the machine was not
calm are counted and left out; where they are half of the runs or more, nothing is judged.

    python benchmarks/timelines.py                              # all lessons, 20 runs each: about 20 minutes
    python benchmarks/timelines.py --minutes 12                 # as many runs, up to 20, as 12 minutes allow
    python benchmarks/timelines.py --lessons 03 09 --runs 5     # two lessons, 5 runs each
    python benchmarks/timelines.py --quick                      # one run each: shows that it runs
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import symtable
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import nbformat
from _rows import Row, single
from nbclient import NotebookClient

LESSONS = Path(__file__).resolve().parents[1] / "lessons"
NUMBERS = ("02", "03", "05", "07", "08", "09", "10", "11")
NUM_RUNS = 20
MINUTES = 60.0
ERROR_BAR, INSIDE_BAR = 0.10, 0.90
MEASURES = r"\boverlay = (overlay_of|measure)"
RESULT = "timeline of this run: "
TELL = f"""
import json as _json
_seen = [overlay.error, overlay.inside, overlay.trouble, *overlay.middle_s, str(overlay)]
print({RESULT!r} + _json.dumps(_seen))
"""


class Run(NamedTuple):
    """What one run of a timeline said: see `Overlay`."""

    error: float
    inside: bool
    trouble: str
    measured_s: float
    predicted_s: float
    text: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lessons", nargs="+", default=NUMBERS, choices=NUMBERS, metavar="NN")
    parser.add_argument("--runs", type=int, default=NUM_RUNS, help=f"runs of each timeline ({NUM_RUNS})")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all lessons; fewer runs where it is short")
    parser.add_argument("--quick", action="store_true", help="one run each: shows that it runs, proves nothing")
    arguments = parser.parse_args(argv)
    failed = 0
    for row in rows(arguments.quick, arguments.lessons, arguments.runs, arguments.minutes):
        print(row, flush=True)
        failed += row.holds is False
    return 1 if failed else 0


def rows(
    quick: bool = False, lessons: Sequence[str] = NUMBERS, num_runs: int = NUM_RUNS, minutes: float = MINUTES
) -> Iterator[Row]:
    """Yield two rows for each timeline of each lesson; the lessons share the minutes."""
    end = time.monotonic() + 60 * minutes
    for place, number in enumerate(lessons):
        left_s = max(0.0, end - time.monotonic()) / (len(lessons) - place)
        yield from rows_of(number, 1 if quick else num_runs, left_s)


def rows_of(number: str, num_runs: int, budget_s: float) -> Iterator[Row]:
    """Yield two rows for each timeline of a lesson: its error, and how often the step was in the band."""
    cells = code_cells(next(LESSONS.glob(f"{number}_*/solution.ipynb")))
    for place, (cell, runs) in enumerate(run_timelines(cells, num_runs, budget_s).items(), 1):
        busy = [run.trouble for run in runs if run.trouble]
        judged = [run for run in runs if not run.trouble] or runs
        errors = [abs(run.error) for run in judged]
        middle, inside = median(errors), sum(run.inside for run in judged) / len(judged)
        signed, measured_s = median(run.error for run in judged), median(run.measured_s for run in judged)
        note = f"cell {cell}, measured {measured_s * 1e3:.3g} ms, bias {signed:+.1%}; {len(runs)} runs, "
        note += f"{len(busy)} not calm" + (f", for example: {busy[0]}" if busy else "")
        enough = 2 * len(busy) < len(runs)  # else the machine was too busy to judge
        what, holds = f"timeline {place} of lesson {number}", middle <= ERROR_BAR if enough else None
        yield single(f"{what}: median error", errors, "relative", bar=f"<= {ERROR_BAR}", holds=holds, note=note)
        claim, holds = f"{what}: measured step in the predicted band", inside >= INSIDE_BAR if enough else None
        yield single(claim, [inside], "of the runs", bar=f">= {INSIDE_BAR}", holds=holds, note=note)


def code_cells(notebook: Path) -> list[str]:
    """Return the source of each code cell, without those that magics run."""
    cells = nbformat.read(notebook, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "code" and not cell.source.lstrip().startswith("%")]


def run_timelines(cells: Sequence[str], num_runs: int, budget_s: float) -> dict[int, list[Run]]:
    """Run each cell that measures, after what it needs; return what each of its runs said, by the cell's number.

    A cell that measures runs at least once, and at most num_runs times; its share of the time that is left ends it.
    """
    end = time.monotonic() + budget_s
    measuring = [index for index, cell in enumerate(cells) if re.search(MEASURES, cell)]
    needed = sorted(set().union(*(needs(cells, index) for index in measuring)) | set(measuring))
    found: dict[int, list[Run]] = {}
    notebook = nbformat.v4.new_notebook()
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(LESSONS)}})
    with client.setup_kernel():
        told(client, "%load_ext distlab.course.notebook")
        for index in needed:
            if index not in measuring:
                told(client, cells[index])
                continue
            left = len(measuring) - len(found)
            stop = time.monotonic() + max(0.0, end - time.monotonic()) / left
            found[index] = []
            while not found[index] or (len(found[index]) < num_runs and time.monotonic() < stop):
                found[index] += told(client, f"{cells[index]}\n{TELL}")
    return found


def told(client: NotebookClient, source: str) -> list[Run]:
    """Run a cell, and return what it said of a timeline.

    Raises:
        CellExecutionError: the cell fails.
    """
    cell = nbformat.v4.new_code_cell(source)
    client.nb.cells.append(cell)
    client.execute_cell(cell, len(client.nb.cells) - 1)
    lines = [line for output in cell.outputs for line in output.get("text", "").splitlines()]
    runs = [Run(*json.loads(line[len(RESULT) :])) for line in lines if line.startswith(RESULT)]
    for run in runs:
        print(f"    {run.text}", file=sys.stderr, flush=True)
    return runs


def needs(cells: Sequence[str], index: int) -> set[int]:
    """Return the cells before a cell that define what it uses, and what those use; checks of answers are left out."""
    found: set[int] = set()
    earlier = {place: defined_by(cell) for place, cell in enumerate(cells[:index]) if " = check(" not in cell}
    for name in used_by(cells[index]):
        before = [place for place, defined in earlier.items() if name in defined]
        if before and before[-1] not in found:
            found |= {before[-1]} | needs(cells, before[-1])
    return found


def defined_by(cell: str) -> set[str]:
    """Return the names that a cell defines at its top level."""
    table = symtable.symtable(cell, "cell", "exec")
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


def used_by(cell: str) -> set[str]:
    """Return the names that a cell takes from others: what it uses, without what it imports and loops over."""
    table = symtable.symtable(cell, "cell", "exec")
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_imported() or symbol.is_namespace()}
    for loop in (node for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.For)):
        own |= {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    top = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    return (top | globals_in(table)) - own


def globals_in(table: symtable.SymbolTable) -> set[str]:
    """Return the global names that functions of a table use."""
    found: set[str] = set()
    for child in table.get_children():
        found |= {symbol.get_name() for symbol in child.get_symbols() if symbol.is_global()} | globals_in(child)
    return found


if __name__ == "__main__":
    sys.exit(main())
