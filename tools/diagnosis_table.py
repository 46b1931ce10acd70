"""Write benchmarks/DIAGNOSIS.md: faults between ranks, what is said of each and after how long; what diagnosis costs.

python tools/diagnosis_table.py            # runs the programs of benchmarks/_faults.py, and the costs
python tools/diagnosis_table.py --faults   # keeps the costs that stand in the page
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from _faults import LIMIT_S, PROGRAMS, Told, has_line, tell  # noqa: E402
from diagnosis import rows  # noqa: E402

from distlab.measure import this_machine  # noqa: E402

TABLE = ROOT / "benchmarks" / "DIAGNOSIS.md"
BACKENDS = ("gloo", "shared")
COSTS = "## What it costs"
HEAD = """# Faults between ranks: what is said, and after how long

Three ranks run a program with one fault (`benchmarks/_faults.py`). "Told after" counts from the call of `run` to its
error; the longest ones wait two seconds in which nothing moves, since a slow job must not be ended. The error names
every rank that has a part in it with file and line; `tests/comm/test_faults_told.py` holds this, and the limit of
{limit} seconds. Written by `python tools/diagnosis_table.py`, {date}, {machine}.

The same is watched in every script with `process_group`, also under torchrun, if all ranks are on one machine
(`distlab.comm.watch`); with nccl only where `watch=True`.

| fault | {backends} | what is said (first line; lines and stacks follow) |
|---|{bars}---|
"""
UNSEEN = """
Calls that are alike (operation, shape, dtype, root, reduction) in swapped order are told by the lines that make them.
No record sees **such calls swapped on one line** (a loop over a list, a function that both go through), or calls whose
source cannot be read. Nor those between which an `if` chooses on a rank, since ranks may take turns by intent; nor
those in two functions of which one is a method or inside a different function, as hooks are.
They meet, and different tensors are added up. `ReplicaVotes` (`distlab.elastic.votes`) tells at its next vote which
rank differs, with step and tensor. On "shared" without the recorder, the root of a broadcast goes on at once, and
learns at its next call that the others made a different one; with it (`run`, `Ranks`, notebooks) all are told at once.
"""


def what_it_says(told: Told) -> str:
    """Return the first line, without what differs from run to run."""
    line = told.text.splitlines()[0] if told.text else "nothing"
    line = re.sub(r"\S*/(?=[\w.]+\.py\b)", "", line)
    line = re.sub(r"^rank [02] of 3 ", "rank r of 3 ", line).replace("|", "\\|")
    return line if len(line) <= 160 else line[:157] + "..."


def faults() -> Iterator[str]:
    """Yield a row for each program."""
    for program in PROGRAMS:
        told = {backend: tell(program, backend) for backend in BACKENDS}
        for backend, one in told.items():
            lacking = [rank for rank in program.lines_of if not has_line(one, rank)]
            if not one.text or lacking or one.seconds > LIMIT_S:
                sys.exit(f"{program.name} on {backend}: {one.seconds:.1f} s, no line of ranks {lacking}: {one.text}")
        print(program.name, *(f"{one.seconds:.1f} s" for one in told.values()), flush=True)
        seconds = " | ".join(f"{one.seconds:.1f} s" for one in told.values())
        doc = " ".join((program.run.__doc__ or "").split()).rstrip(".")
        yield f"| {doc} | {seconds} | {what_it_says(told['gloo'])} |"


def costs() -> str:
    """Return the section of costs, measured now."""
    lines = [COSTS, "", "Processor time of a rank, medians.", ""]
    lines += ["| holds | what | cost | 95 % | bar | |", "|---|---|---|---|---|---|"]
    for row in rows():
        print(row, flush=True)
        value, unit = (row.ratio, "x") if row.ratio is not None else (row.ours, f" {row.unit}")
        low, high = row.interval
        verdict = {True: "yes", False: "**no**", None: ""}[row.holds]
        lines.append(
            f"| {verdict} | {row.claim} | {value:.3g}{unit} | {low:.3g} to {high:.3g} | {row.bar} | {row.note} |"
        )
    lines += ["", "A recorded call on gloo stands in [RESULTS.md](RESULTS.md) (`recorder`)."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page."""
    before = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    kept = COSTS + before.partition(COSTS)[2] if COSTS in before and "--faults" in sys.argv else ""
    machine = this_machine()
    head = HEAD.format(
        limit=f"{LIMIT_S:g}",
        date=machine.date,
        machine=f"{machine.processor}, {machine.cores} cores, torch {machine.torch}",
        backends=" | ".join(f"told after, {backend}" for backend in BACKENDS),
        bars="---|" * len(BACKENDS),
    )
    text = head + "\n".join(faults()) + "\n" + UNSEEN + "\n" + (kept or costs())
    TABLE.write_text(text, encoding="utf-8")
    print(f"wrote {TABLE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
