"""Write benchmarks/RESULTS.md, and the README's headline rows, from benchmarks/results.json.

The page has the rows that miss their bar, the worst first, and counts for each benchmark.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
START, END = "<!-- bars -->", "<!-- end of bars -->"
HALF_A_DIGIT = 0.5e-4  # "equal to 4 decimals"
# The README's rows, one per subject: the benchmark and the first words of the claim, kept whether the bar holds or not.
HEADLINES = (
    ("data_parallel", "a DataParallel step of the small GPT on 2 ranks"),
    ("collectives", "ring all-reduce of 64 MiB float32 on 4 ranks"),
    ("compression", "Cast float16: a step of 8 million parameters on 2 ranks"),
    ("sharding_units", "a FullyShard step of the small GPT on 4 ranks"),
    ("tensor_parallel", "a tensor-parallel step of the small GPT on 4 ranks"),
    ("pipeline", "a step of one_f_one_b on 4 ranks"),
    ("context_parallel", "ring attention over 2,048 positions on 4 ranks"),
    ("expert_parallel", "a step of ExpertParallel on 4 ranks (cpu, gloo) against all experts"),
    ("checkpoint", "gradients averaged by DataParallel: runs not bitwise equal"),
    ("launch", "a rank that is killed by SIGKILL is reported"),
    ("tour", "step time of the small GPT on 2 ranks, predicted"),
    ("memory", "peak memory of a step of the small GPT, ZeRO stage 3 on 4 ranks: predicted"),
)


class Measured(NamedTuple):
    """One row of a benchmark, and where it was measured.

    Attributes:
        benchmark: name of the benchmark that measures it.
        machine: what `describe` says of the machine.
        row: the row as `distlab bench --save` keeps it.
    """

    benchmark: str
    machine: str
    row: dict[str, Any]

    @property
    def judged(self) -> bool:
        """Whether the row has a bar."""
        return self.row["holds"] is not None

    @property
    def value(self) -> float:
        """Return the measured ratio, or the measured value where the bar is absolute."""
        row = self.row
        return float(row["ours"] if row["ratio"] is None else row["ratio"])


def all_rows(results: dict[str, Any]) -> list[Measured]:
    """Return the rows of every benchmark."""
    return [
        Measured(name, describe(part["machine"]), row) for name, part in sorted(results.items()) for row in part["rows"]
    ]


def nearness(measured: Measured) -> float:
    """Return the measured value in units of its bar: 1 is on the bar, more than 1 is beyond it."""
    bar, value = measured.row["bar"], measured.value
    if bar.startswith("within"):
        return max(value, 1 / value) / number_in(bar)
    if bar.startswith("equal"):
        return abs(value - measured.row["peer"]) / HALF_A_DIGIT
    limit = measured.row["peer"] + number_in(bar) if "published" in bar else number_in(bar)
    if limit == 0:
        return 0.0 if value == 0 else math.inf
    return value / limit


def number_in(bar: str) -> float:
    """Return the first number of a bar."""
    found = re.search(r"\d+(\.\d+)?", bar)
    if found is None:
        raise ValueError(f"the bar {bar!r} has no number; teach tools/bench_table.py how near a row is to it")
    return float(found.group())


def worst_first(rows: list[Measured]) -> list[Measured]:
    """Return the rows that miss their bar, then the others, each by how near they are to it."""
    return sorted(rows, key=lambda one: (one.row["holds"], -nearness(one)))


def describe(machine: dict[str, Any]) -> str:
    gpus = f", {machine['gpus'][0]}" if machine["gpus"] else ""
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    where = f"on {machine['processor']}, {machine['cores']} cores, {memory}{gpus}"
    return f"{machine['date']} {where}, {machine['system']}, Python {machine['python']}, torch {machine['torch']}"


def results_text(results: dict[str, Any]) -> str:
    """Return the page as Markdown: counts, machines, the rows that miss their bar, and the benchmarks."""
    rows = all_rows(results)
    machines = machines_of(rows)
    judged = worst_first([one for one in rows if one.judged])
    lines = [summary(judged), "", *(f"- Run {run}: {machine}." for run, machine in enumerate(machines, 1)), ""]
    never = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in results and path.stem[0] != "_")
    lines += [f"Benchmarks without a kept run: {', '.join(never)}.", ""] if never else []
    lines += ["## Bars that are missed, the worst first", "", *missed_rows(judged, machines)]
    return "\n".join([*lines, "", "## Every benchmark", "", *counts(rows, machines)])


def machines_of(rows: list[Measured]) -> list[str]:
    """Return the machines and dates of the runs, which are numbered in this order."""
    return sorted({one.machine for one in rows})


def missed_rows(judged: list[Measured], machines: list[str]) -> Iterator[str]:
    """Yield the table of the rows that miss their bar."""
    yield "| claim | bar | measured | 95 % interval | benchmark | run |"
    yield "|---|---|---|---|---|---|"
    for one in judged:
        if not one.row["holds"]:
            cells = (one.row["claim"], one.row["bar"], *figures(one), one.benchmark)
            yield f"| {' | '.join(cells)} | {machines.index(one.machine) + 1} |"


def counts(rows: list[Measured], machines: list[str]) -> Iterator[str]:
    """Yield the table of how many bars of each benchmark hold, and which row that holds is nearest to its bar."""
    yield "| benchmark | bars that hold | of | of those that hold, the nearest to its bar | run |"
    yield "|---|---|---|---|---|"
    for name in sorted({one.benchmark for one in rows}):
        judged = worst_first([one for one in rows if one.benchmark == name and one.judged])
        held = [one for one in judged if one.row["holds"]]
        nearest = f"{held[0].row['claim']}: {figures(held[0])[0]} ({held[0].row['bar']})" if held else "-"
        runs = sorted({machines.index(one.machine) + 1 for one in rows if one.benchmark == name})
        yield f"| {name} | {len(held)} | {len(judged)} | {nearest} | {', '.join(map(str, runs))} |"


def headline_text(results: dict[str, Any]) -> str:
    """Return the README's rows as Markdown, the worst first."""
    rows = [one for one in all_rows(results) if one.judged]
    lines = [summary(rows), "", "| claim | bar | measured | holds |", "|---|---|---|---|"]
    for one in worst_first(list(headlines(rows))):
        lines.append(f"| {one.row['claim']} | {one.row['bar']} | {figures(one)[0]} | {verdict(one)} |")
    return "\n".join(lines)


def headlines(rows: list[Measured]) -> Iterator[Measured]:
    """Yield the rows that HEADLINES names.

    Raises:
        ValueError: a headline is not the beginning of any claim.
    """
    for benchmark, start in HEADLINES:
        found = [one for one in rows if one.benchmark == benchmark and one.row["claim"].startswith(start)]
        # A longer claim may begin alike ("..., full recompute: predicted"), so the shortest one is meant.
        if not found:
            raise ValueError(
                f"no claim of {benchmark} begins with {start!r}; correct HEADLINES in tools/bench_table.py"
            )
        yield min(found, key=lambda one: len(one.row["claim"]))


def summary(rows: list[Measured]) -> str:
    """Return how many of the judged rows hold, and when they were measured."""
    dates = sorted({one.machine.split()[0] for one in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{sum(bool(one.row['holds']) for one in rows)} of {len(rows)} bars hold; measured {when}."


def figures(measured: Measured) -> tuple[str, str]:
    """Return the measured value and its interval as text."""
    row = measured.row
    value = f"{row['ours']:.3g} {row['unit']}".strip() if row["ratio"] is None else f"{row['ratio']:.2f}x"
    low, high = row["interval"]
    return value, f"{low:.3g} to {high:.3g}"


def verdict(measured: Measured) -> str:
    return "yes" if measured.row["holds"] else "**no**"


def written(path: Path, text: str) -> str:
    """Return a file's content with `text` between its two markers.

    Raises:
        ValueError: the file does not have the markers.
    """
    before = path.read_text()
    if START not in before or END not in before:
        raise ValueError(f"{path.name} has no {START} ... {END}; put the two lines where the table belongs")
    return re.sub(rf"{START}.*?{END}", lambda _: f"{START}\n\n{text}\n\n{END}", before, flags=re.S)


def files() -> dict[Path, str]:
    """Return what README.md and benchmarks/RESULTS.md should contain."""
    results = json.loads((BENCHMARKS / "results.json").read_text())
    readme, table = ROOT / "README.md", BENCHMARKS / "RESULTS.md"
    return {readme: written(readme, headline_text(results)), table: written(table, results_text(results))}


def main() -> int:
    try:
        wanted = files()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
